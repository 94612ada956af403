"""OLMo 2: norms after each branch and none before; queries and keys are normed over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, DecoderLayer
from kvgraph.models.family import Family, Into
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.rms_decoder import (
    GATED_MLP,
    HEAD_NORMS,
    QKVO,
    RMSConfig,
    gated_mlp,
    read_rms,
    rms_decoder,
    same_names,
)
from kvgraph.models.rope import read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2Config(RMSConfig):
    """OLMo 2's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
    """

    attention_bias: bool


def config_from_hf(hf: Mapping[str, Any]) -> Olmo2Config:
    """Read an `olmo2` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_rms(reader)
    config = Olmo2Config(
        **common,
        attention_bias=reader.flag("attention_bias", default=False),
        rope=read_rope(reader, common["head_dim"]),
    )
    reader.refuse_unread(config.model_type)
    return config


class Olmo2Attention(Attention):
    """Attention that norms whole projections, before they are split into heads."""

    def __init__(self, config: Olmo2Config, precision: Precision) -> None:
        super().__init__(config, precision, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        eps, dim, dtype = config.rms_norm_eps, config.head_dim, precision.compute
        self.q_norm = RMSNorm(config.num_attention_heads * dim, eps, dtype)
        self.k_norm = RMSNorm(config.num_key_value_heads * dim, eps, dtype)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.queries_and_keys`."""
        query, key = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        return self.split_heads(query), self.split_heads(key)


class Olmo2Layer(DecoderLayer):
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: Olmo2Config, precision: Precision) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config, precision)
        self.kv_shape = self.self_attn.kv_shape
        size, eps = config.hidden_size, config.rms_norm_eps
        self.post_attention_layernorm = RMSNorm(size, eps, precision.residual)
        self.mlp = gated_mlp(config, precision)
        self.post_feedforward_layernorm = RMSNorm(size, eps, precision.residual)
        self.compute = precision.compute

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderLayer`."""
        attended, key, value = self.self_attn(
            hidden_states.to(self.compute), past_length, past_key, past_value, *shared
        )
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(hidden_states.to(self.compute))
        return hidden_states + self.post_feedforward_layernorm(fed_forward), key, value


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Olmo2Config)
    return rms_decoder(
        config,
        precision,
        [CausalMask(), Rotary(config.rope, config.head_dim, precision.compute)],
        [Olmo2Layer(config, precision) for _ in range(config.num_hidden_layers)],
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    return same_names([*norms, *QKVO, *HEAD_NORMS, *GATED_MLP])


FAMILY = Family("olmo2", config_from_hf, build, weight_names)
