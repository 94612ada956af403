"""GGUF files opened as checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kvgraph.models.checkpoint import Checkpoint, CheckpointSource, open_checkpoint
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import plan_weights

V, E, F, H, K, D = 97, 32, 64, 4, 2, 10
SHAPES = {"token_embd": (V, E), "output_norm": (E,), "output": (V, E)}
LAYER_SHAPES = {
    "attn_norm": (E,),
    "attn_q": (H * D, E),
    "attn_k": (K * D, E),
    "attn_v": (K * D, E),
    "attn_output": (E, H * D),
    "ffn_norm": (E,),
    "ffn_gate": (F, E),
    "ffn_up": (F, E),
    "ffn_down": (E, F),
}


def write(
    path: Path,
    *,
    kind: Kind = Kind.F32,
    describe: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    without: str = "",
    seed: int = 0,
    **splits: int,
) -> Path:
    """A Llama of two layers and random weights, `kind` where rows have whole blocks."""
    writer = gguf.GGUFWriter(path, "llama", **splits)
    writer.add_context_length(64)
    writer.add_embedding_length(E)
    writer.add_block_count(2)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(K)
    writer.add_key_length(D)
    writer.add_value_length(D)
    writer.add_layer_norm_rms_eps(1e-5)
    describe(writer)
    rng = np.random.default_rng(seed)
    layers = {f"blk.{layer}.{name}": shape for layer in range(2) for name, shape in LAYER_SHAPES.items()}
    for name, shape in {**SHAPES, **layers}.items():
        stored = kind if len(shape) == 2 and shape[1] % 32 == 0 else Kind.F32
        data = gguf.quantize(rng.standard_normal(shape).astype(np.float32), stored)
        if f"{name}.weight" != without:
            writer.add_tensor(f"{name}.weight", data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def describe_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(letter) for letter in range(33, 127)])
    writer.add_token_types([gguf.TokenType.NORMAL] * 94)
    writer.add_token_merges([])
    writer.add_eos_token_id(5)


def check(checkpoint: Checkpoint) -> None:
    """Compare the weights with what the model needs, as an export does."""
    config, stream = checkpoint.config, checkpoint.weights()
    with torch.device("meta"):
        decoder = family(config.model_type).build(config, Precision(torch.float32, torch.float32))
    plan = plan_weights(family(config.model_type), decoder, stream.names)
    stream.check(plan.shapes, plan.ignorable)


def test_a_file_opens(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", describe=describe_tokens)
    checkpoint = open_checkpoint(str(path))
    check(checkpoint)
    assert checkpoint.source == CheckpointSource("gguf", str(path), None)
    assert (checkpoint.config.model_type, checkpoint.config.head_dim) == ("llama", D)
    assert (checkpoint.dtype(), checkpoint.has_tokenizer) == ("float32", True)
    assert checkpoint.files() == {"m.gguf": path.stat().st_size}


def test_what_a_bundle_carries_is_written(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", describe=describe_tokens))
    (tmp_path / "bundle").mkdir()
    checkpoint.write_tokenizer(tmp_path / "bundle")
    names = {path.name for path in (tmp_path / "bundle").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert json.loads((tmp_path / "bundle" / "generation_config.json").read_text()) == {"eos_token_id": [5]}
    assert checkpoint.generation_config == {"eos_token_id": [5]}


def test_a_file_without_a_vocabulary_carries_nothing(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf"))
    (tmp_path / "bundle").mkdir()
    checkpoint.write_tokenizer(tmp_path / "bundle")
    assert not checkpoint.has_tokenizer
    assert not list((tmp_path / "bundle").iterdir())


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    single = open_checkpoint(write(tmp_path / "single.gguf", kind=Kind.Q8_0))
    write(tmp_path / "m.gguf", kind=Kind.Q8_0, split_max_tensors=8)
    first = tmp_path / "m-00001-of-00003.gguf"
    parts = open_checkpoint(first)
    check(parts)
    assert list(parts.files()) == [f"m-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for name in single.weights().names:
        rows = single.weights().spec(name).shape[0]
        assert torch.equal(
            parts.weights().read_rows(name, 0, rows), single.weights().read_rows(name, 0, rows)
        )


DAMAGE: dict[str, dict[str, Any]] = {
    r"1 weight is missing: model.layers.1.mlp.up_proj.weight; the metadata asks": {
        "without": "blk.1.ffn_up.weight"
    },
    r"1 weight is not expected: blk.0.attn_scale.weight; the model that the metadata describes": {
        "describe": lambda writer: writer.add_tensor("blk.0.attn_scale.weight", np.ones(3, dtype=np.float32))
    },
    r"weight 'blk.0.ffn_gate.weight' has shape \[64, 32\], the metadata says \[65, 32\]": {
        "describe": lambda writer: writer.add_feed_forward_length(65)
    },
    r"weight 'blk.0.attn_q.weight' has shape \[40, 32\], the metadata says \[32, 32\]": {
        "describe": lambda writer: (writer.add_key_length(8), writer.add_value_length(8))
    },
}


@pytest.mark.parametrize("message", DAMAGE)
def test_tensors_that_do_not_fit_the_metadata_are_named(message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"odd.gguf: {message}"):
        check(open_checkpoint(write(tmp_path / "odd.gguf", **DAMAGE[message])))


def test_the_digest_covers_metadata_and_weights(tmp_path: Path) -> None:
    def digest(folder: str, **changes: Any) -> str:
        (tmp_path / folder).mkdir()
        return open_checkpoint(write(tmp_path / folder / "m.gguf", **changes)).digest()

    same = digest("a")
    assert digest("b") == same
    others = [digest("c", describe=describe_tokens), digest("d", seed=1), digest("e", kind=Kind.Q8_0)]
    assert len({same, *others}) == 4


def test_without_the_gguf_package_the_way_to_get_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "kvgraph.models.gguf_checkpoint", None)
    with pytest.raises(ImportError, match=r"reading .*m.gguf needs gguf; pip install 'kvgraph\[export\]'"):
        open_checkpoint(path)
