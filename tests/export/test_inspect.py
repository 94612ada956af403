"""`kvgraph inspect` of a configuration and a checkpoint: counts against published figures and the files themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvgraph import cli
from kvgraph.export.inspect import Inspection, inspect

# The shape of Llama-3-8B, whose size is published: 8,030,261,248 parameters.
EIGHT_BILLION = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TINY = {
    **EIGHT_BILLION,
    "hidden_size": 20,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 97,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
    "dtype": "float16",
}


def write_config(folder: Path, config: dict[str, object]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def eight_billion(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    return inspect(write_config(tmp_path_factory.mktemp("8b"), EIGHT_BILLION), batch_size=4, context=4096)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A random checkpoint of `TINY` whose k projections are stored in float32, the rest in float16."""
    write_config(tmp_path, TINY)
    shapes = {"model.embed_tokens.weight": (97, 20), "model.norm.weight": (20,)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (20,),
            prefix + "self_attn.q_proj.weight": (32, 20),
            prefix + "self_attn.k_proj.weight": (16, 20),
            prefix + "self_attn.v_proj.weight": (16, 20),
            prefix + "self_attn.o_proj.weight": (20, 32),
            prefix + "post_attention_layernorm.weight": (20,),
            prefix + "mlp.gate_proj.weight": (24, 20),
            prefix + "mlp.up_proj.weight": (24, 20),
            prefix + "mlp.down_proj.weight": (20, 24),
        }
    random = np.random.default_rng(0)
    weights = {
        name: random.standard_normal(shape).astype(np.float32 if "k_proj" in name else np.float16)
        for name, shape in shapes.items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def test_parameters_of_the_8b_shape_are_the_published_number(eight_billion: Inspection) -> None:
    assert eight_billion.parameters == 8_030_261_248


def test_parts_of_the_8b_shape_follow_from_its_sizes(eight_billion: Inspection) -> None:
    expected = {
        "embedding": 128256 * 4096,
        "attention": 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024),
        "ffn": 32 * 3 * 4096 * 14336,
        "norms": (2 * 32 + 1) * 4096,
        "head": 128256 * 4096,
    }
    assert {part.name: part.parameters for part in eight_billion.parts} == expected
    assert {part.name: part.share for part in eight_billion.parts} == {
        name: pytest.approx(count / 8_030_261_248) for name, count in expected.items()
    }


def test_cache_of_the_8b_shape_takes_131072_bytes_a_token_in_float16(eight_billion: Inspection) -> None:
    assert eight_billion.cache.dtypes == ("float16",)
    assert eight_billion.cache.bytes_per_token == 131_072
    assert eight_billion.cache.nbytes == 131_072 * 4 * 4096


def test_8b_shape_is_inspected_without_its_memory(tmp_path: Path) -> None:
    config = write_config(tmp_path, EIGHT_BILLION)
    code = (
        "from kvgraph.export.inspect import inspect; from kvgraph.runtime.machine import peak_memory_bytes; "
        f"inspect({str(config)!r}); print(peak_memory_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1e9  # torch itself; the weights would be 16 GB


def test_dtype_option_sets_the_cache_of_a_configuration(tmp_path: Path) -> None:
    found = inspect(write_config(tmp_path, EIGHT_BILLION), dtype="float32")
    assert found.cache.bytes_per_token == 262_144


def test_head_dim_biases_and_a_tied_head_are_counted_from_the_configuration(tmp_path: Path) -> None:
    found = inspect(write_config(tmp_path, {**TINY, "attention_bias": True, "mlp_bias": True}))
    assert {part.name: part.parameters for part in found.parts} == {
        "embedding": 97 * 20,
        "attention": 2 * (20 * (32 + 16 + 16 + 32) + 32 + 16 + 16 + 20),
        "ffn": 2 * (3 * 20 * 24 + 24 + 24 + 20),
        "norms": 5 * 20,
        "head": 0,
    }
    assert found.tied_head


def test_checkpoint_counts_and_bytes_are_those_of_its_file(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    found = inspect(checkpoint)
    assert found.kind == "checkpoint"
    assert found.parameters == sum(array.size for array in weights.values())
    assert found.nbytes == sum(array.nbytes for array in weights.values())


def test_checkpoint_shows_the_stored_dtype_of_every_kind_of_weight(checkpoint: Path) -> None:
    kinds = {kind.name: (kind.dtype, kind.shape, kind.count) for kind in inspect(checkpoint).weights}
    assert kinds["model.layers.{i}.self_attn.q_proj.weight"] == ("float16", (32, 20), 2)
    assert kinds["model.layers.{i}.self_attn.k_proj.weight"] == ("float32", (16, 20), 2)
    assert kinds["model.embed_tokens.weight"] == ("float16", (97, 20), 1)


def test_incomplete_checkpoint_is_an_error_that_names_the_weight(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        inspect(checkpoint)


def test_command_prints_the_figures_under_headings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(write_config(tmp_path, EIGHT_BILLION))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["total", "8,030,261,248", "100.00%", "16,061,054,976"] in lines
    assert ["ffn", "5,637,144,576", "70.20%", "11,274,289,152"] in lines
    assert ["per", "token", "131,072"] in lines
