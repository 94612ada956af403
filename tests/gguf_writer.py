"""A writer of GGUF files: names by the gguf package's own map, weights changed as llama.cpp's converter changes them.

Loaded by the fixture `write_gguf`. That transformers finds the original weights in its files shows that they are what
they are meant to be, see `tests/export/test_gguf.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Config = dict[str, Any]
BLOCK = 32
ARCHITECTURES = {"gemma3_text": "gemma3"}


def architecture_of(config: Config) -> str:
    return ARCHITECTURES.get(config["model_type"], config["model_type"])


def in_pairs(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a head with the two of each pair beside each other instead of in two halves."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def converted(config: Config, name: str, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """A weight as llama.cpp's converter stores it."""
    model_type = config["model_type"]
    if model_type == "llama" and "q_proj" in name:
        return in_pairs(weight, config["num_attention_heads"])
    if model_type == "llama" and "k_proj" in name:
        return in_pairs(weight, config["num_key_value_heads"])
    if model_type == "gemma3_text" and name.endswith("norm.weight"):
        return weight + np.float32(1)
    return np.ascontiguousarray(weight.T) if is_turned(config, name, weight) else weight


def is_turned(config: Config, name: str, weight: NDArray[np.float32]) -> bool:
    """Whether a matrix is stored as [out, in] where Hugging Face has it as [in, out]."""
    return config["model_type"] == "gpt2" and ".c_" in name and weight.ndim == 2


def write_sizes(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gpt2":
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if config["model_type"] in ("gemma3_text", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def write_rope(writer: gguf.GGUFWriter, config: Config) -> None:
    if config["model_type"] == "gpt2":
        return
    rope = config["rope_parameters"]
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.for_model(**config), "cpu")
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    if rope["rope_type"] == "longrope":
        _, factor = ROPE_INIT_FUNCTIONS["longrope"](AutoConfig.for_model(**config), "cpu")
        writer.add_rope_scaling_attn_factors(factor)
        for length in ("short", "long"):
            divisors = np.array(rope[f"{length}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", divisors)


def write_gguf(
    directory: Path,
    path: Path,
    kind: Kind,
    describe: Callable[[gguf.GGUFWriter], object] = lambda _: None,
) -> dict[str, torch.Tensor]:
    """Convert a checkpoint; returns its weights with the loss that `kind` makes.

    As in llama.cpp, vectors stay float32, and so do rows that blocks do not divide.

    Args:
        directory: The checkpoint.
        path: The file.
        kind: Type of the matrices.
        describe: Adds metadata.
    """
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture_of(config))
    write_sizes(writer, config)
    write_rope(writer, config)
    describe(writer)
    architecture = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[writer.arch]
    names = gguf.get_tensor_name_map(architecture, config.get("num_hidden_layers") or config["n_layer"])
    weights = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        stored = converted(config, name, weight.numpy())
        quantized = kind if stored.ndim == 2 and stored.shape[1] % BLOCK == 0 else Kind.F32
        data = gguf.quantize(stored, quantized)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=quantized)
        # Every row is quantized alone, so that their order does not matter; vectors are not quantized.
        rows = stored if is_turned(config, name, stored) else weight.numpy()
        lossy = gguf.dequantize(gguf.quantize(rows, quantized), quantized)
        weights[name] = torch.from_numpy((lossy.T if is_turned(config, name, lossy) else lossy).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
