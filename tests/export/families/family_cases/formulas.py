"""The textbook models from their formulas, one text at a time, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import cross_key, cross_value, past_key, past_value
from kvgraph.runtime.session import Ids

Array = NDArray[np.float64]
Weights = dict[str, Array]
Config = dict[str, Any]


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def rms_norm(weights: Weights, name: str, x: Array, config: Config) -> Array:
    squares, eps = (x**2).mean(-1, keepdims=True), config["rms_norm_eps"]
    scale = np.sqrt(squares + eps) if config["eps_inside_root"] else np.sqrt(squares) + eps
    return x / scale * weights[f"{name}.weight"]


def layer_norm(weights: Weights, name: str, x: Array, config: Config) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rotate(x: Array, config: Config) -> Array:
    """[heads, S, D]: pairs as complex numbers, turned by position * theta ** (-2r / D)."""
    dim = x.shape[-1]
    frequencies = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * np.arange(x.shape[1])[:, None] * frequencies)
    neighbours = slice(0, dim, 2), slice(1, dim, 2)
    halves = slice(0, dim // 2), slice(dim // 2, dim)
    first, second = neighbours if config["rope_interleaved"] else halves
    pairs, result = (x[..., first] + 1j * x[..., second]) * turn, np.empty_like(x)
    result[..., first], result[..., second] = pairs.real, pairs.imag
    return result


def heads_of(weights: Weights, name: str, x: Array, count: int) -> Array:
    """[S, E] to [count, S, D]."""
    return linear(weights, name, x).reshape(len(x), count, -1).swapaxes(0, 1)


def attention(
    weights: Weights, name: str, x: Array, read: Array, config: Config, causal: bool
) -> tuple[Array, Array, Array]:
    """What x [S, E] takes from read [C, E], and the keys and values [K, C, D] of the latter."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    query = heads_of(weights, f"{name}.wq", x, heads)
    key = heads_of(weights, f"{name}.wk", read, kv_heads)
    value = heads_of(weights, f"{name}.wv", read, kv_heads)
    if "rope_theta" in config:
        query, key = rotate(query, config), rotate(key, config)
    repeated = (np.repeat(states, heads // kv_heads, axis=0) for states in (key, value))
    every_key, every_value = repeated
    scores = query @ every_key.swapaxes(1, 2) / math.sqrt(query.shape[-1])
    if causal:
        scores = scores + np.triu(np.full(scores.shape[1:], -np.inf), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    result = shares / shares.sum(-1, keepdims=True) @ every_value
    return linear(weights, f"{name}.wo", result.swapaxes(0, 1).reshape(len(x), -1)), key, value


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


def feed_forward(weights: Weights, block: str, x: Array, config: Config) -> Array:
    """The Transformer of 2017 has ReLU and says nothing; the pre-norm decoder has SwiGLU and says nothing."""
    default = "swiglu" if config["model_type"] == "pre_norm_decoder" else "plain"
    first = linear(weights, f"{block}.ffn.w1", x)
    if config.get("ffn", default) == "plain":
        return linear(weights, f"{block}.ffn.w2", ACTIVATIONS[config.get("hidden_act", "relu")](first))
    silu = first / (1 + np.exp(-first))
    return linear(weights, f"{block}.ffn.w3", silu * linear(weights, f"{block}.ffn.w2", x))


def embedded(weights: Weights, side: str, ids: Ids, config: Config) -> Array:
    """Token ids [S] to [S, E]; `side` is "source", "target" or, of a decoder alone, anything."""
    has_encoder, size = "encoder_layers" in config, config["hidden_size"]
    x = weights.get(f"{side}_embed.weight", weights.get("embed.weight"))[ids]
    if config.get("scale_embeddings", has_encoder):
        x = x * math.sqrt(size)
    positions = config.get("positions", "sinusoidal" if has_encoder else "rotary")
    if positions == "learned":
        return x + weights["positions.weight"][: len(ids)]
    if positions == "sinusoidal":
        for position in range(len(ids)):
            for i in range(size // 2):
                angle = position / 10000 ** (2 * i / size)
                x[position, 2 * i] += math.sin(angle)
                x[position, 2 * i + 1] += math.cos(angle)
    return x


def encode(weights: Weights, ids: Ids, config: Config) -> Array:
    """What leaves the encoder of the Transformer, [C, E]."""
    x = embedded(weights, "source", ids, config)
    for block in (f"encoder.{layer}" for layer in range(config["encoder_layers"])):
        attended, _, _ = attention(weights, f"{block}.attn", x, x, config, False)
        x = layer_norm(weights, f"{block}.norm1", x + attended, config)
        x = layer_norm(weights, f"{block}.norm2", x + feed_forward(weights, block, x, config), config)
    return x


def transformer(
    weights: Weights, source_ids: Ids, ids: Ids, config: Config
) -> tuple[Array, dict[str, Array]]:
    """Logits [S, V] of a text behind a source, and the keys and values of the text and of the source."""
    source, x, kept = encode(weights, source_ids, config), embedded(weights, "target", ids, config), {}
    for layer in range(config["decoder_layers"]):
        block = f"decoder.{layer}"
        attended, *own = attention(weights, f"{block}.self_attn", x, x, config, True)
        x = layer_norm(weights, f"{block}.norm1", x + attended, config)
        crossed, *cross = attention(weights, f"{block}.cross_attn", x, source, config, False)
        x = layer_norm(weights, f"{block}.norm2", x + crossed, config)
        x = layer_norm(weights, f"{block}.norm3", x + feed_forward(weights, block, x, config), config)
        names = (past_key(layer), past_value(layer), cross_key(layer), cross_value(layer))
        kept |= dict(zip(names, (*own, *cross), strict=True))
    return head(weights, x, config), kept


def decoder(weights: Weights, ids: Ids, config: Config) -> tuple[Array, dict[str, Array]]:
    """Logits [S, V] of a text, and its keys and values."""
    x, kept, pre = embedded(weights, "", ids, config), {}, config["model_type"] == "pre_norm_decoder"
    for layer in range(config["num_hidden_layers"]):
        block = f"blocks.{layer}"
        normed = rms_norm(weights, f"{block}.attn_norm", x, config) if pre else x
        attended, key, value = attention(weights, f"{block}.attn", normed, normed, config, True)
        x = x + attended
        if pre:
            x = x + feed_forward(weights, block, rms_norm(weights, f"{block}.ffn_norm", x, config), config)
        else:
            x = layer_norm(weights, f"{block}.norm1", x, config)
            x = layer_norm(weights, f"{block}.norm2", x + feed_forward(weights, block, x, config), config)
        kept |= {past_key(layer): key, past_value(layer): value}
    return head(weights, rms_norm(weights, "norm", x, config) if pre else x, config), kept


def head(weights: Weights, x: Array, config: Config) -> Array:
    """[S, E] to logits [S, V]."""
    table = weights.get("target_embed.weight", weights.get("embed.weight"))
    weight = table if config["tie_word_embeddings"] else weights["head.weight"]
    return x @ weight.T + weights.get("head.bias", 0.0)
