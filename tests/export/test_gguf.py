"""Models in GGUF files against the same weights in a Hugging Face directory.

The files are those of `tests/gguf_writer.py`. That transformers finds the original weights in them shows that they are
what they are meant to be.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import kvgraph
from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.session import Floats, Session

Config = dict[str, Any]
WriteGGUF = Callable[..., dict[str, torch.Tensor]]
FORMATS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1]
SIZES = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 10}
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
TRAINED = {"original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.125, 1.25, 1.375, 1.5, 1.75],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
}
# Everything that a family has and that files can say; heads of 10 make rows that no block divides.
MODELS: dict[str, Config] = {
    "llama": {**SIZES, "rope_parameters": DEFAULT},
    "llama with biases": {
        **SIZES,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 10000.0},
    },
    "llama trained short": {**SIZES, "rope_parameters": {**LLAMA3, **TRAINED}},
    "qwen2": {"hidden_size": 32, "head_dim": 8, "rope_parameters": DEFAULT},
    "qwen3": {**SIZES, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, **TRAINED}},
    "gemma3_text": {
        **SIZES,
        "num_hidden_layers": 7,
        "sliding_window": 5,
        "query_pre_attn_scalar": 10,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "phi3": {
        "hidden_size": 64,
        "head_dim": 16,
        "sliding_window": 5,
        "original_max_position_embeddings": 16,
        "rope_parameters": {**LONGROPE, **TRAINED},
    },
    "gpt2": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_key_value_heads": 4,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(scope="session")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """The Hugging Face directory of one of MODELS."""
    return lambda name: tiny_checkpoint(name.split()[0], **MODELS[name])


def logits(session: Session, length: int = 24) -> Floats:
    ids = np.random.default_rng(3).integers(0, 97, (2, length))
    past, rows = np.zeros(2, dtype=np.int64), np.tile(np.arange(length), (2, 1))
    return session.prefill(session.allocate_cache(2), ids, past, rows, np.full(2, length))


def describe_tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_same_weights_in_a_directory(
    name: str, kind: Kind, checkpoint: Callable[[str], Path], write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    weights = write_gguf(checkpoint(name), tmp_path / "model.gguf", kind)
    save_file(weights, tmp_path / "model.safetensors")
    shutil.copyfile(checkpoint(name) / "config.json", tmp_path / "config.json")
    imported, original = open_checkpoint(tmp_path / "model.gguf"), open_checkpoint(tmp_path)
    assert np.array_equal(logits(TorchSession.open(imported)), logits(TorchSession.open(original)))


def rounded(value: Any) -> Any:
    """The same with numbers as float32, which is what files hold."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return np.float32(value) if isinstance(value, float) else value


# Of rotations that another formula divides than that of the published models, the file has the result alone.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama trained short"])
def test_the_config_is_that_of_the_directory(
    name: str, checkpoint: Callable[[str], Path], write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    write_gguf(checkpoint(name), tmp_path / "model.gguf", Kind.F32, describe_tokens)
    imported = open_checkpoint(tmp_path / "model.gguf")
    assert rounded(imported.config.to_json()) == rounded(open_checkpoint(checkpoint(name)).config.to_json())
    assert imported.dtype() == "float32"


@pytest.mark.parametrize("name", MODELS)
def test_transformers_finds_the_original_weights_in_the_files_of_these_tests(
    name: str, checkpoint: Callable[[str], Path], write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    write_gguf(checkpoint(name), tmp_path / "model.gguf", Kind.F32)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(name))
    read = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    original = load_file(checkpoint(name) / "model.safetensors")
    assert read.keys() == original.keys()
    for key, weight in original.items():
        # Less the one that Gemma's norms had added.
        torch.testing.assert_close(read[key], weight, rtol=0, atol=1e-6, msg=key)


def test_a_real_model_is_the_same_from_either(
    shared_data: Path, write_gguf: WriteGGUF, tmp_path: Path
) -> None:
    directory, path = shared_data / "stories260k", tmp_path / "stories260k.gguf"
    write_gguf(directory, path, Kind.F32, describe_tokens)
    imported, original = open_checkpoint(path), open_checkpoint(directory)
    assert imported.config == original.config
    assert np.array_equal(logits(TorchSession.open(imported)), logits(TorchSession.open(original)))


def describe_stories(directory: Path, writer: gguf.GGUFWriter) -> None:
    """The vocabulary of stories260k, whose scores are the ranks of the merges."""
    tokenizer = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    ranks = {"".join(merge): -float(rank) for rank, merge in reversed(list(enumerate(tokenizer["merges"])))}
    tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    types = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([ranks.get(token, -1e6) for token in tokens])
    writer.add_token_types(
        [types.UNKNOWN, *[types.CONTROL] * 2, *[types.BYTE] * 256, *[types.NORMAL] * (len(tokens) - 259)]
    )
    writer.add_unk_token_id(0)
    describe_tokens(writer)


def test_a_real_model_gives_the_same_bundle_and_writes(
    shared_data: Path,
    write_gguf: WriteGGUF,
    tmp_path: Path,
    exported: Callable[..., Bundle],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, path = shared_data / "stories260k", tmp_path / "stories260k.gguf"
    write_gguf(directory, path, Kind.F32, functools.partial(describe_stories, directory))
    assert main(["export", str(path), "-o", str(tmp_path / "bundle")]) == 0
    files, original = Bundle.open(tmp_path / "bundle").files, exported(directory).files
    for name in ("prefill.onnx", "decode.onnx", "weights.safetensors"):
        assert files[name] == original[name]
    text = kvgraph.load(tmp_path / "bundle").generate("Once upon a time", max_new_tokens=40).text
    assert text.startswith(", there was a little girl named Lily. She loved to play outside in the park.")
    assert main(["compare", str(tmp_path / "bundle"), "--steps", "4"]) == 0
    assert main(["inspect", str(path)]) == 0
    assert "stories260k.gguf" in capsys.readouterr().out
