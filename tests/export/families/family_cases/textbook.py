"""Models of tutorials, whose tensors the docstrings of their families document."""

from __future__ import annotations

from typing import Any

from family_cases.case import LENGTH, VOCABULARY, Case

SIZES = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 44,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
PRE_NORM = {
    **SIZES,
    "model_type": "pre_norm_decoder",
    "num_hidden_layers": 2,
    "hidden_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    # Large, so that its place matters.
    "rms_norm_eps": 0.1,
    "eps_inside_root": True,
    "rope_theta": 1000.0,
    "rope_interleaved": False,
}
POST_NORM = {
    **SIZES,
    "model_type": "post_norm_decoder",
    "num_hidden_layers": 2,
    "hidden_size": 30,
    "num_attention_heads": 3,
    "layer_norm_eps": 0.1,
    "positions": "sinusoidal",
    "scale_embeddings": True,
    "ffn": "plain",
    "hidden_act": "gelu",
}
ROTARY = {"positions": "rotary", "rope_theta": 1000.0, "rope_interleaved": True, "scale_embeddings": False}
TRANSFORMER = {
    **SIZES,
    "model_type": "post_norm_encoder_decoder",
    "source_vocab_size": 61,
    "hidden_size": 30,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "num_attention_heads": 3,
    "layer_norm_eps": 0.1,
    "attention_bias": True,
    "share_embeddings": False,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}
ONE_TABLE = {"share_embeddings": True, "source_vocab_size": VOCABULARY, "tie_word_embeddings": True}
CASES = [
    Case("pre_norm_decoder, two key/value heads", PRE_NORM, exported=False),
    Case(
        "pre_norm_decoder, one key/value head, eps outside the root",
        {**PRE_NORM, "num_key_value_heads": 1, "eps_inside_root": False},
    ),
    Case(
        "pre_norm_decoder, as many key/value heads as heads, interleaved, tied",
        {**PRE_NORM, "num_key_value_heads": 6, "rope_interleaved": True, "tie_word_embeddings": True},
        exported=False,
    ),
    Case("post_norm_decoder, sinusoidal, plain", POST_NORM),
    Case(
        "post_norm_decoder, learned, tanh",
        {**POST_NORM, "positions": "learned", "hidden_act": "gelu_pytorch_tanh", "head_bias": True},
        exported=False,
    ),
    Case(
        "post_norm_decoder, rotary, swiglu",
        {
            **{key: value for key, value in POST_NORM.items() if key != "hidden_act"},
            **ROTARY,
            "ffn": "swiglu",
        },
        exported=False,
    ),
    Case(
        "post_norm_decoder, rotary by halves, relu, tied, wide heads",
        {
            **POST_NORM,
            **ROTARY,
            "rope_interleaved": False,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "head_dim": 12,
        },
        exported=False,
    ),
    Case("post_norm_encoder_decoder, two tables and a head", TRANSFORMER, exported=False),
    Case(
        "post_norm_encoder_decoder, one table, no attention biases",
        {**TRANSFORMER, **ONE_TABLE, "attention_bias": False},
    ),
    Case(
        "post_norm_encoder_decoder, biased head, unscaled, wide heads",
        {**TRANSFORMER, "head_bias": True, "scale_embeddings": False, "head_dim": 12},
        exported=False,
    ),
]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint."""
    if "encoder_layers" in config:
        return encoder_decoder_shapes(config)
    pre, size, inner = config["model_type"] == "pre_norm_decoder", config["hidden_size"], 44
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", size // heads)
    kv_size = config.get("num_key_value_heads", heads) * dim
    swiglu = config.get("ffn", "swiglu") == "swiglu"
    linears = {"attn.wq": (heads * dim, size), "attn.wk": (kv_size, size), "attn.wv": (kv_size, size)}
    linears |= {"attn.wo": (size, heads * dim), "ffn.w1": (inner, size)}
    linears |= {"ffn.w2": (inner, size), "ffn.w3": (size, inner)} if swiglu else {"ffn.w2": (size, inner)}
    norms = ("attn_norm", "ffn_norm") if pre else ("norm1", "norm2")
    result: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, size)}
    for block in (f"blocks.{layer}." for layer in range(config["num_hidden_layers"])):
        for name, shape in {**linears, **dict.fromkeys(norms, (size,))}.items():
            result[f"{block}{name}.weight"] = shape
            if not pre and not (swiglu and name.startswith("ffn")):
                result[f"{block}{name}.bias"] = shape[:1]
    if pre:
        result["norm.weight"] = (size,)
    if config.get("positions") == "learned":
        result["positions.weight"] = (LENGTH, size)
    return result | head_shapes(config)


def encoder_decoder_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of the Transformer of 2017."""
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
    return result | head_shapes(config)


def head_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors behind the layers."""
    result: dict[str, tuple[int, ...]] = {}
    if not config["tie_word_embeddings"]:
        result["head.weight"] = (VOCABULARY, config["hidden_size"])
    if config.get("head_bias"):
        result["head.bias"] = (VOCABULARY,)
    return result
