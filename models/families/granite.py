"""Granite: Llama with a multiplier each on embeddings, scores, what layers add, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import (
    GATED_MLP,
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
class GraniteConfig(RMSConfig):
    """Granite's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
        mlp_bias: Whether the gate, up and down projections have biases.
        embedding_multiplier: Factor on embeddings.
        attention_multiplier: Factor on scores, in place of 1 / sqrt(head_dim).
        residual_multiplier: Factor on what attention and feed-forward part add to the stream.
        logits_scaling: Divisor of the logits.
    """

    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def config_from_hf(hf: Mapping[str, Any]) -> GraniteConfig:
    """Read a `granite` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_rms(reader)
    config = GraniteConfig(
        **common,
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=reader.flag("mlp_bias", default=False),
        embedding_multiplier=reader.number("embedding_multiplier"),
        attention_multiplier=reader.number("attention_multiplier"),
        residual_multiplier=reader.number("residual_multiplier"),
        logits_scaling=reader.number("logits_scaling"),
        rope=read_rope(reader, common["head_dim"]),
    )
    reader.refuse_unread(config.model_type)
    return config


class GraniteLayer(SequentialLayer):
    """x + m * attention(norm(x)), then x + m * mlp(norm(x))."""

    residual_multiplier: float

    def scaled(self, branch: Tensor, stream: Tensor) -> Tensor:
        """What `branch` adds to `stream`: multiplied in float32, for 0.22 is 0.2197 in bfloat16."""
        return (branch.to(torch.float32) * self.residual_multiplier).to(stream.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderLayer`."""
        normed = self.input_layernorm(hidden_states)
        attended, key, value = self.self_attn(normed, past_length, past_key, past_value, *shared)
        hidden_states = hidden_states + self.scaled(attended, hidden_states)
        fed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.scaled(fed_forward, hidden_states), key, value


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, GraniteConfig)
    compute, bias = precision.compute, config.attention_bias

    def layer() -> GraniteLayer:
        made = GraniteLayer(
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            Attention(config, precision, qkv_bias=bias, out_bias=bias, scale=config.attention_multiplier),
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            gated_mlp(config, precision, config.mlp_bias),
        )
        made.residual_multiplier = config.residual_multiplier
        return made

    return rms_decoder(
        config,
        precision,
        [CausalMask(), Rotary(config.rope, config.head_dim, compute)],
        [layer() for _ in range(config.num_hidden_layers)],
        embedding_scale=config.embedding_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    return same_names([*PRE_NORMS, *QKVO, *GATED_MLP])


FAMILY = Family("granite", config_from_hf, build, weight_names)
