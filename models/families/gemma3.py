"""Gemma 3 with a vision part: its language model alone, which reads text; the tensors that see are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.families import gemma3_text
from kvgraph.models.families.gemma3_text import Gemma3TextConfig
from kvgraph.models.family import Family, Into

PREFIX = "language_model."
# What published files leave out of `text_config`, and every library takes from one class.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
# For files that neither list the layers nor nest the ropes.
LAYER_DEFAULTS: Mapping[str, Any] = {"sliding_window_pattern": 6}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
# Of the whole model, beside those of its text.
SHARED = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype")
# What the model does with images.
VISION = (
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "mm_tokens_per_image",
    "vision_config",
    "vision_feature_layer",
)


def config_from_hf(hf: Mapping[str, Any]) -> Gemma3TextConfig:
    """Read the text part of a `gemma3` config.json.

    Raises:
        ValueError: There is none, or see `gemma3_text.config_from_hf`.
    """
    reader = ConfigReader(hf)
    reader.ignore(*VISION, *SHARED)
    reader.require("tie_word_embeddings", True, "the head of Gemma 3 is its embedding table")
    text = reader.value("text_config")
    if not isinstance(text, Mapping):
        raise reader.error(f"text_config is {text!r}, expected an object")
    reader.refuse_unread("gemma3")
    values = {**DEFAULTS, **{key: hf[key] for key in SHARED if key in hf}, **text}
    if "layer_types" not in text and "_sliding_window_pattern" not in text:
        values = {**LAYER_DEFAULTS, **values}
    if "rope_parameters" not in text:
        values = {**ROPE_DEFAULTS, **values}
    return replace(gemma3_text.config_from_hf(values), model_type="gemma3")


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Names of the text model behind those of the part that it is."""
    return {f"{PREFIX}{name}": into for name, into in gemma3_text.weight_names(config).items()}


FAMILY = Family(
    "gemma3",
    config_from_hf,
    gemma3_text.build,
    weight_names,
    left_out=("vision_tower.", "multi_modal_projector."),
)
