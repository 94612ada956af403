"""The content of config.json that the metadata of a GGUF file amounts to.

Keys begin with the name of the architecture, `llama.context_length`. Whatever there is under that name is read, or
is an error: it may change what the model computes. Everything else (authors, licences, imatrix, sampling) does not.
"""

from __future__ import annotations

from typing import Any

from gguf import GGMLQuantizationType

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.gguf_file import GGUFFile
from kvgraph.models.gguf_rope import read_phi3_rope, read_scaled_rope
from kvgraph.models.layer_types import FULL, SLIDING

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# These may be lists, with one value for each layer.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
# Features that are off at this value.
_OFF = {
    "attention.causal": (True, "only decoders are implemented"),
    "expert_count": (0, "experts are not read from GGUF files"),
    "expert_used_count": (0, "experts are not read from GGUF files"),
    "pooling_type": (0, "only language models are implemented"),
}


def architecture_reader(file: GGUFFile, architecture: str) -> ConfigReader:
    """A reader of the keys that begin with `architecture`, without that beginning.

    Raises:
        ValueError: A key has a value for each layer, and they differ.
    """
    prefix = f"{architecture}."
    values: dict[str, Any] = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    where = f"{file.path}: metadata {architecture}"
    for key in _PER_LAYER:
        listed = values.get(key)
        if isinstance(listed, list):
            if len(listed) != values.get("block_count") or len(set(listed)) != 1:
                raise ValueError(f"{where}.{key} is {listed}; layers that differ in it are not implemented")
            values[key] = listed[0]
    return ConfigReader(values, where)


def read_sizes(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """The keys that every family has, and what is off in all of them.

    Raises:
        ValueError: A key is missing or malformed, or says what is not implemented.
    """
    for key, (off, reason) in _OFF.items():
        reader.require(key, off, reason)
    # How the converter found the file; it always writes this one layout.
    reader.ignore("tensor_data_layout")
    heads, hidden = reader.integer("attention.head_count"), reader.integer("embedding_length")
    head_dim = reader.integer("attention.key_length", default=hidden // heads)
    reader.require("attention.value_length", head_dim, "keys and values have one size")
    return {
        "vocab_size": _vocab_size(reader, file),
        "hidden_size": hidden,
        "intermediate_size": reader.integer("feed_forward_length"),
        "num_hidden_layers": reader.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.integer("context_length"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": read_dtype(file),
    }


def read_dtype(file: GGUFFile) -> str:
    """The type that all matrices have, or float32, which holds what quantized ones stand for.

    Vectors, norms and biases, are float32 in every file.
    """
    kinds = {tensor.type for tensor in file.tensors.values() if len(tensor.shape) > 1}
    if kinds == {GGMLQuantizationType.F16}:
        return "float16"
    return "bfloat16" if kinds == {GGMLQuantizationType.BF16} else "float32"


def llama(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """The keys of `llama`; Mistral models without a window are of this architecture, too."""
    config = _rms_config(reader, file)
    theta = reader.number("rope.freq_base", default=10000.0)
    return {
        **config,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_parameters": read_scaled_rope(reader, file, theta, config["head_dim"]),
    }


def qwen2(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """The keys of `qwen2`; files have no windows, which published models leave off."""
    config = _rms_config(reader, file)
    theta = reader.number("rope.freq_base")
    return {
        **config,
        "use_sliding_window": False,
        "rope_parameters": read_scaled_rope(reader, file, theta, config["head_dim"]),
    }


def qwen3(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """The keys of `qwen3`."""
    return {**qwen2(reader, file), "attention_bias": "blk.0.attn_q.bias" in file.tensors}


def gemma3(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """The keys of `gemma3_text`."""
    config = _rms_config(reader, file)
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    window = reader.integer("attention.sliding_window", default=0, minimum=0) or None
    theta, sliding_theta = (
        reader.number("rope.freq_base"),
        reader.number("rope.freq_base_swa", default=10000.0),
    )
    softcap = reader.value("final_logit_softcapping")
    # No key says it. Only the largest model, of 62 layers, has another one than the others.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else head_dim
    return {
        **config,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": softcap or None,
        "sliding_window": window,
        "layer_types": _layer_types(reader, layers) if window else [FULL] * layers,
        "rope_parameters": {
            FULL: read_scaled_rope(reader, file, theta, head_dim),
            SLIDING: {"rope_type": "default", "rope_theta": sliding_theta},
        },
    }


def phi3(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """The keys of `phi3`."""
    config = _rms_config(reader, file)
    if not reader.has("attention.sliding_window"):
        raise reader.error(
            "attention.sliding_window is missing: early converters left it out, though models have one; convert the "
            "model again"
        )
    return {
        **config,
        "sliding_window": reader.integer("attention.sliding_window", minimum=0) or None,
        "rope_parameters": read_phi3_rope(reader, file, reader.number("rope.freq_base"), config["head_dim"]),
    }


def gpt2(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    """The keys of `gpt2`."""
    config = read_sizes(reader, file)
    heads, head_dim = config["num_attention_heads"], config.pop("head_dim")
    if config.pop("num_key_value_heads") != heads or head_dim * heads != config["hidden_size"]:
        raise reader.error("attention.head_count_kv and attention.key_length are not those of a GPT-2")
    return {
        **config,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": reader.number("attention.layer_norm_epsilon"),
    }


def _rms_config(reader: ConfigReader, file: GGUFFile) -> dict[str, Any]:
    epsilon = reader.number("attention.layer_norm_rms_epsilon")
    return {**read_sizes(reader, file), "hidden_act": "silu", "rms_norm_eps": epsilon}


def _vocab_size(reader: ConfigReader, file: GGUFFile) -> int:
    """Rows of the embedding, which is what other places must agree with."""
    if EMBEDDING not in file.tensors:
        raise ValueError(f"{file.path}: tensor {EMBEDDING!r} is missing; the file holds no whole model")
    rows = file.tensors[EMBEDDING].shape[0]
    reader.require("vocab_size", rows, f"tensor {EMBEDDING!r} has so many rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise ValueError(f"{file.path}: {len(tokens)} tokens, but tensor {EMBEDDING!r} has {rows} rows")
    return rows


def _layer_types(reader: ConfigReader, layers: int) -> list[str]:
    """Which layers have a window: a list says it of each, a number n that every n-th has none."""
    pattern = reader.value("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers:
            raise reader.error(
                f"attention.sliding_window_pattern has {len(pattern)} values, expected {layers}"
            )
        return [SLIDING if slides else FULL for slides in pattern]
    period = reader.integer("attention.sliding_window_pattern", default=6)
    return [SLIDING if layer % period else FULL for layer in range(1, layers + 1)]
