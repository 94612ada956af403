"""Qwen 3: every head's query and key are normed before the rotation; no biases unless the config asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import read_switched_windows
from kvgraph.models.layers import NormedAttention, Precision, RMSNorm
from kvgraph.models.positions import Rotary, Shared, masks, suffix
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import (
    GATED_MLP,
    HEAD_NORMS,
    PRE_NORMS,
    QKVO,
    RMSConfig,
    gated_mlp,
    read_rms,
    rms_decoder,
    same_names,
)
from kvgraph.models.rope import read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(RMSConfig):
    """Qwen3's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
        layer_types: full_attention or sliding_attention, for each layer.
        sliding_window: How many tokens one sees in a sliding layer, itself included.
    """

    attention_bias: bool
    layer_types: tuple[str, ...]
    sliding_window: int | None


def config_from_hf(hf: Mapping[str, Any]) -> Qwen3Config:
    """Read a `qwen3` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    # Not derived from the hidden size: transformers takes 128 where it is absent.
    head_dim = reader.integer("head_dim")
    common = read_rms(reader)
    layer_types, sliding_window = read_switched_windows(reader, common["num_hidden_layers"])
    config = Qwen3Config(
        **common,
        attention_bias=reader.flag("attention_bias", default=False),
        layer_types=layer_types,
        sliding_window=sliding_window,
        rope=read_rope(reader, head_dim),
    )
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Qwen3Config)
    compute = precision.compute

    def layer(layer_type: str) -> SequentialLayer:
        return SequentialLayer(
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            NormedAttention(
                config,
                precision,
                qkv_bias=config.attention_bias,
                out_bias=config.attention_bias,
                norm_eps=config.rms_norm_eps,
            ),
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            gated_mlp(config, precision),
            kind=layer_type,
            shared=(f"mask{suffix(layer_type)}", "cos", "sin"),
        )

    shared: list[Shared] = [
        *masks(config.layer_types, config.sliding_window),
        Rotary(config.rope, config.head_dim, compute),
    ]
    return rms_decoder(config, precision, shared, [layer(layer_type) for layer_type in config.layer_types])


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    return same_names([*PRE_NORMS, *QKVO, *HEAD_NORMS, *GATED_MLP])


FAMILY = Family("qwen3", config_from_hf, build, weight_names)
