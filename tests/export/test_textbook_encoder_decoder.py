"""The Transformer of 2017 against its formulas in NumPy, in eager torch and on ONNX Runtime."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import cross_key, past_value
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.torch_encoder_session import open_torch_session
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.encoder_session import EncoderSession
from kvgraph.runtime.open import open_session
from kvgraph.runtime.session import Floats, Ids

# float32 against float64, on logits of up to 10.
TOLERANCE = 1e-4
LENGTH, TARGET_VOCABULARY, SOURCE_VOCABULARY = 64, 97, 61
SOURCE_LENGTHS = (1, 19)

Array = NDArray[np.float64]
Weights = dict[str, Array]


class Case(NamedTuple):
    """A tiny checkpoint, and whether it is also exported, which takes seconds."""

    config: dict[str, Any]
    exported: bool = False


TRANSFORMER = {
    "model_type": "post_norm_encoder_decoder",
    "source_vocab_size": SOURCE_VOCABULARY,
    "vocab_size": TARGET_VOCABULARY,
    "hidden_size": 30,
    "intermediate_size": 44,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": LENGTH,
    # Large, so that its place matters.
    "layer_norm_eps": 0.1,
    "attention_bias": True,
    "share_embeddings": False,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}
ONE_TABLE = {"share_embeddings": True, "source_vocab_size": TARGET_VOCABULARY, "tie_word_embeddings": True}
CASES = {
    "two tables and a head": Case(TRANSFORMER),
    "one table, no attention biases": Case({**TRANSFORMER, **ONE_TABLE, "attention_bias": False}, True),
    "biased head, unscaled, wide heads": Case(
        {**TRANSFORMER, "head_bias": True, "scale_embeddings": False, "head_dim": 12}, True
    ),
}
EXPORTED = [name for name, case in CASES.items() if case.exported]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the module docstring documents."""
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    wide = heads * config.get("head_dim", size // heads)
    sizes = {"q": (wide, size), "k": (wide, size), "v": (wide, size), "o": (size, wide)}
    result: dict[str, tuple[int, ...]] = {}
    if config["share_embeddings"]:
        result["embed.weight"] = (config["vocab_size"], size)
    else:
        result["source_embed.weight"] = (config["source_vocab_size"], size)
        result["target_embed.weight"] = (config["vocab_size"], size)
    sides = (("encoder", ("attn",)), ("decoder", ("self_attn", "cross_attn")))
    for side, attentions in sides:
        for block in (f"{side}.{layer}" for layer in range(config[f"{side}_layers"])):
            for attention in attentions:
                for letter, shape in sizes.items():
                    result[f"{block}.{attention}.w{letter}.weight"] = shape
                    if config["attention_bias"]:
                        result[f"{block}.{attention}.w{letter}.bias"] = shape[:1]
            for name, shape in (("w1", (inner, size)), ("w2", (size, inner))):
                result |= {f"{block}.ffn.{name}.weight": shape, f"{block}.ffn.{name}.bias": shape[:1]}
            for number in range(1, len(attentions) + 2):
                result |= {f"{block}.norm{number}.{kind}": (size,) for kind in ("weight", "bias")}
    if not config["tie_word_embeddings"]:
        result["head.weight"] = (config["vocab_size"], size)
    if config.get("head_bias"):
        result["head.bias"] = (config["vocab_size"],)
    return result


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Weights]]:
    """A case's directory and its tensors."""

    @functools.cache
    def make(name: str) -> tuple[Path, Weights]:
        random, config = np.random.default_rng(11), CASES[name].config
        tensors = {
            tensor: (random.normal(0, 0.4, shape) + (".norm" in tensor)).astype(np.float32)
            for tensor, shape in shapes(config).items()
        }
        path = tmp_path_factory.mktemp(config["model_type"])
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))
        return path, {tensor: array.astype(np.float64) for tensor, array in tensors.items()}

    return make


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def layer_norm(weights: Weights, name: str, x: Array, config: dict[str, Any]) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attention(weights: Weights, name: str, x: Array, read: Array, causal: bool, heads: int) -> Array:
    """One text's attention: x [S, E] to read [C, E]."""
    query, key, value = (
        linear(weights, f"{name}.w{letter}", states).reshape(len(states), heads, -1).swapaxes(0, 1)
        for letter, states in (("q", x), ("k", read), ("v", read))
    )
    scores = query @ key.swapaxes(1, 2) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores + np.triu(np.full(scores.shape[1:], -np.inf), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    result = shares / shares.sum(-1, keepdims=True) @ value
    return linear(weights, f"{name}.wo", result.swapaxes(0, 1).reshape(len(x), -1))


def feed_forward(weights: Weights, block: str, x: Array) -> Array:
    return linear(weights, f"{block}.ffn.w2", np.maximum(linear(weights, f"{block}.ffn.w1", x), 0))


def embedded(table: Array, ids: Ids, config: dict[str, Any]) -> Array:
    size = config["hidden_size"]
    x = table[ids] * (math.sqrt(size) if config.get("scale_embeddings", True) else 1)
    for position in range(len(ids)):
        for i in range(size // 2):
            angle = position / 10000 ** (2 * i / size)
            x[position, 2 * i] += math.sin(angle)
            x[position, 2 * i + 1] += math.cos(angle)
    return x


def encode(weights: Weights, ids: Ids, config: dict[str, Any]) -> Array:
    """What leaves the encoder, [C, E]."""
    x, heads = embedded(weights.get("source_embed.weight", weights.get("embed.weight")), ids, config), 3
    for block in (f"encoder.{layer}" for layer in range(config["encoder_layers"])):
        x = layer_norm(
            weights, f"{block}.norm1", x + attention(weights, f"{block}.attn", x, x, False, heads), config
        )
        x = layer_norm(weights, f"{block}.norm2", x + feed_forward(weights, block, x), config)
    return x


def decode(weights: Weights, source: Array, ids: Ids, config: dict[str, Any]) -> tuple[Array, list[Array]]:
    """Logits [S, V] at every position, and what enters each layer."""
    table, heads = weights.get("target_embed.weight", weights.get("embed.weight")), 3
    x, entered = embedded(table, ids, config), []
    for block in (f"decoder.{layer}" for layer in range(config["decoder_layers"])):
        entered.append(x)
        own = attention(weights, f"{block}.self_attn", x, x, True, heads)
        x = layer_norm(weights, f"{block}.norm1", x + own, config)
        crossed = attention(weights, f"{block}.cross_attn", x, source, False, heads)
        x = layer_norm(weights, f"{block}.norm2", x + crossed, config)
        x = layer_norm(weights, f"{block}.norm3", x + feed_forward(weights, block, x), config)
    head = table if config["tie_word_embeddings"] else weights["head.weight"]
    return x @ head.T + weights.get("head.bias", 0.0), entered


@functools.cache
def torch_session(path: Path) -> EncoderSession:
    return open_torch_session(open_checkpoint(path))


@pytest.fixture
def session(
    name: str,
    runtime: str,
    make_checkpoint: Callable[[str], tuple[Path, Weights]],
    exported: Callable[..., Bundle],
) -> EncoderSession:
    path = make_checkpoint(name)[0]
    return torch_session(path) if runtime == "torch" else open_session(exported(path), threads=1)


BOTH_RUNTIMES = [
    pytest.param(name, runtime, id=f"{name}-{runtime}")
    for name, case in CASES.items()
    for runtime in (("torch", "ort") if case.exported else ("torch",))
]


@pytest.mark.parametrize(
    "sizes", [[LENGTH], [1] * LENGTH, [9, 21] + [1] * 34], ids=["prefill", "decode", "both"]
)
@pytest.mark.parametrize(("name", "runtime"), BOTH_RUNTIMES)
def test_logits_and_caches_equal_the_formulas(
    name: str,
    session: EncoderSession,
    sizes: list[int],
    make_checkpoint: Callable[[str], tuple[Path, Weights]],
    teacher_forced: Callable[..., Floats],
) -> None:
    config, weights = CASES[name].config, make_checkpoint(name)[1]
    random, heads = np.random.default_rng(5), config["num_attention_heads"]
    sources = random.integers(0, config["source_vocab_size"], (2, max(SOURCE_LENGTHS)))
    targets = random.integers(0, config["vocab_size"], (2, LENGTH))
    encoded = session.encode(sources, np.array(SOURCE_LENGTHS))
    cache = session.allocate_cache(2, LENGTH)
    session.attach(cache, encoded)
    found = teacher_forced(session, targets, sizes, cache)
    for row, length in enumerate(SOURCE_LENGTHS):
        states = encode(weights, sources[row, :length], config)
        logits, entered = decode(weights, states, targets[row], config)
        np.testing.assert_allclose(found[row], logits, atol=TOLERANCE, rtol=0)
        for layer, x in enumerate(entered):
            block = f"decoder.{layer}"
            value = linear(weights, f"{block}.self_attn.wv", x).reshape(LENGTH, heads, -1).swapaxes(0, 1)
            np.testing.assert_allclose(
                cache.read(past_value(layer))[row, :, :LENGTH], value, atol=TOLERANCE, rtol=0
            )
            key = linear(weights, f"{block}.cross_attn.wk", states).reshape(length, heads, -1).swapaxes(0, 1)
            np.testing.assert_allclose(
                encoded.read(cross_key(layer))[row, :, :length], key, atol=TOLERANCE, rtol=0
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_float16_graphs_build_in_tensorrt_rtx(
    name: str, make_checkpoint: Callable[[str], tuple[Path, Weights]], exported: Callable[..., Bundle]
) -> None:
    bundle = exported(make_checkpoint(name)[0], dtype="float16")
    options = TensorRTOptions(max_batch=2, max_context=LENGTH, compute_capabilities=(89,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (89,)
