"""`kvgraph export --recipe`: the bundle that export and quantize write one after the other, and what it refuses."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvgraph.cli import main
from kvgraph.export import parameter_rows
from kvgraph.export.bundle import BUNDLE_FILE, Bundle
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.quant import tensor_writer
from kvgraph.quant.bundle_weights import BundleWeights

MSE_BY_CHANNEL = """
[linear.weight]
format = "int8"
clip = "mse"
"""
ALL_IN_FOUR_BITS = """
lm_head = "linear"
embedding = "linear"
[linear.weight]
format = "int4"
block_size = 16
"""
# A fused matrix by rows, the same by columns, experts in a stack, and values that are added to.
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"pad_token_id": 0, "hidden_size": 32, "attention_bias": False},
    "gpt2": {"hidden_size": 32, "num_key_value_heads": None, "n_inner": 44, "n_positions": 64},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "gemma": {"tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def two_steps(quick_tracing: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """What `export` and then `quantize` write."""

    @functools.cache
    def export(checkpoint: Path, flags: tuple[str, ...]) -> Path:
        output = tmp_path_factory.mktemp("float") / "bundle"
        assert main(["export", str(checkpoint), "-o", str(output), *flags]) == 0
        return output

    def run(checkpoint: Path, recipe: str, *flags: str) -> Path:
        output = tmp_path_factory.mktemp("quantized") / "bundle"
        source = export(checkpoint, flags)
        assert main(["quantize", str(source), "-o", str(output), "--recipe", recipe]) == 0
        return output

    return run


@pytest.fixture
def in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands, parts, pieces and slabs of the tiny models' weights, by several threads."""
    monkeypatch.setattr(tensor_writer, "BAND_WEIGHTS", 256)
    monkeypatch.setattr(tensor_writer, "PART_WEIGHTS", 256)
    monkeypatch.setattr(parameter_rows, "PIECE_BYTES", 256)
    monkeypatch.setattr(parameter_rows, "_SLAB_BYTES", 300)


def assert_same(found: Path, expected: Path) -> None:
    """Every file, and all of bundle.json but for what says which bundle was quantized."""
    descriptions = []
    for path in (found, expected):
        data = json.loads((path / BUNDLE_FILE).read_text())
        digest = data["quantization"].pop("source_digest")
        assert (digest == data["source"]["digest"]) == (path == found)
        descriptions.append(data)
    assert descriptions[0] == descriptions[1]
    assert sorted(file.name for file in found.iterdir()) == sorted(file.name for file in expected.iterdir())
    # The hashes that were just compared are those of the files.
    Bundle.open(found, verify=True)


@pytest.mark.parametrize(("dtype", "tied"), [("float32", False), ("bfloat16", True)])
@pytest.mark.parametrize(
    "recipe",
    [
        "int8-wo",
        "int8-dynamic",
        "fp8-dynamic",
        "uint4-wo",
        "nvfp4-wo",
        "mse.toml",
        "all.toml",
        "prefill=int8-dynamic,decode=int4-wo",
    ],
)
def test_is_what_export_and_quantize_write(
    recipe: str,
    dtype: str,
    tied: bool,
    tiny_llama: Callable[..., Path],
    two_steps: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_small_pieces: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mse.toml").write_text(MSE_BY_CHANNEL)
    Path("all.toml").write_text(ALL_IN_FOUR_BITS)
    checkpoint, output = tiny_llama(tie_word_embeddings=tied), tmp_path / "out"
    flags = ["--dtype", dtype, "--capacity", "32"]
    assert main(["export", str(checkpoint), "-o", str(output), "--recipe", recipe, *flags]) == 0
    assert_same(output, two_steps(checkpoint, recipe, *flags))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_reads_every_form_of_checkpoint(
    model_type: str,
    tiny_checkpoint: Callable[..., Path],
    two_steps: Callable[..., Path],
    tmp_path: Path,
    in_small_pieces: None,
) -> None:
    checkpoint = tiny_checkpoint(model_type, **FAMILIES[model_type])
    output = tmp_path / "direct"
    flags = ["--dtype", "float16"]
    for recipe in ("int4-wo", "int8-wo"):
        assert (
            main(["export", str(checkpoint), "-o", str(output), "--recipe", recipe, "--force", *flags]) == 0
        )
        assert_same(output, two_steps(checkpoint, recipe, *flags))


def test_quantizes_a_gguf_file(
    tiny_llama: Callable[..., Path],
    write_gguf: Callable[..., object],
    two_steps: Callable[..., Path],
    tmp_path: Path,
) -> None:
    file, sizes = tmp_path / "model.gguf", {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    source = tiny_llama(**sizes, tie_word_embeddings=True)
    write_gguf(source, file, gguf.GGMLQuantizationType.Q8_0)
    flags = ["--dtype", "float16"]
    assert main(["export", str(file), "-o", str(tmp_path / "out"), "--recipe", "int4-wo", *flags]) == 0
    assert_same(tmp_path / "out", two_steps(file, "int4-wo", *flags))


def test_quantizes_what_a_quantized_checkpoint_stands_for(
    tiny_llama: Callable[..., Path], packers: ModuleType, two_steps: Callable[..., Path], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    pack, settings = packers.gptq(8), packers.gptq_settings(8)
    checkpoint, _ = packers.pack_checkpoint(tiny_llama(**sizes), tmp_path / "packed", pack, settings)
    arguments = ["export", str(checkpoint), "-o", str(tmp_path / "out"), "--recipe", "int4-wo"]
    assert main([*arguments, "--no-keep-quantized"]) == 0
    assert_same(tmp_path / "out", two_steps(checkpoint, "int4-wo", "--no-keep-quantized"))


def test_weights_are_those_of_the_checkpoint(
    tiny_llama: Callable[..., Path], quick_tracing: None, tmp_path: Path
) -> None:
    """Against the formula of rounding by channel, from the file as safetensors reads it."""
    checkpoint = tiny_llama()
    assert main(["export", str(checkpoint), "-o", str(tmp_path / "out"), "--recipe", "int8-wo"]) == 0
    name = "model.layers.1.mlp.down_proj.weight"
    exact = load_file(checkpoint / "model.safetensors")[name].numpy().T
    with BundleWeights(Bundle.open(tmp_path / "out")) as weights:
        codes, scale = weights.read(name), weights.read(f"{name}_scale")
    np.testing.assert_array_equal(scale, np.abs(exact).max(axis=0) / np.float32(127))
    np.testing.assert_array_equal(codes, np.rint(exact / scale))


def test_says_what_it_did(
    tiny_llama: Callable[..., Path],
    quick_tracing: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = "prefill=int8-dynamic,decode=int4-wo"
    assert main(["export", str(tiny_llama()), "-o", str(tmp_path / "out"), "--recipe", recipe]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["module", "graphs", "weight", "input", "count"]
    assert "left float: lm_head             the recipe keeps it" in lines
    assert f"float32, weights as {recipe} has them" in lines[-1]


def test_damaged_weight_leaves_nothing(
    tiny_llama: Callable[..., Path],
    quick_tracing: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, name = tmp_path / "checkpoint", "model.layers.1.mlp.down_proj.weight"
    source.mkdir()
    (source / "config.json").write_text((tiny_llama() / "config.json").read_text())
    tensors = load_file(tiny_llama() / "model.safetensors")
    tensors[name][3, 2] = torch.nan
    save_file(tensors, source / "model.safetensors")
    assert main(["export", str(source), "-o", str(tmp_path / "out"), "--recipe", "int8-wo"]) == 2
    assert f"weight '{name}' holds nan in row 3" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "int3"], "recipe 'int3' is not known; known are fp8"),
        (["--recipe", "fp8"], "recipe 'fp8' needs data; export without it"),
        (["--recipe", "prefill=int8-sq,decode=int8-wo"], "recipe 'int8-sq' needs data; export without it"),
        (["--recipe", "gptq.toml"], "recipe 'gptq' needs data"),
        (["--recipe", "cache.toml"], "recipe 'cache' needs data"),
        (["--recipe", "rotated.toml"], "recipe 'rotated' asks for a rotation"),
        (["--recipe", "int8-wo", "--no-weights"], "leave it or --no-weights out"),
        (["--recipe", "int8-wo", "--keep-quantized"], "has no quantized weights to keep; leave --keep"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_before_tracing(
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gptq.toml").write_text(f'algorithm = "gptq"\n{MSE_BY_CHANNEL}')
    Path("rotated.toml").write_text(f'rotation = "hadamard"\n{MSE_BY_CHANNEL}')
    Path("cache.toml").write_text(f'{MSE_BY_CHANNEL}\n[kv_cache]\nformat = "int8"\ngranularity = "head"\n')
    monkeypatch.setattr("kvgraph.export.exporter.trace_model", None)
    checkpoint = tiny_llama()
    # The one that makes the checkpoint sees a bar of transformers.
    capsys.readouterr()
    assert main(["export", str(checkpoint), "-o", "out", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvgraph: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not Path("out").exists()


def test_quantized_checkpoint_keeps_its_codes(
    tiny_llama: Callable[..., Path],
    packers: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    pack, settings = packers.gptq(8), packers.gptq_settings(8)
    checkpoint, _ = packers.pack_checkpoint(tiny_llama(**sizes), tmp_path / "packed", pack, settings)
    assert open_checkpoint(checkpoint).quantized() is not None
    assert main(["export", str(checkpoint), "-o", str(tmp_path / "out"), "--recipe", "int4-wo"]) == 2
    error = capsys.readouterr().err
    assert "its quantized weights are kept as they are" in error
    assert "add --no-keep-quantized" in error
