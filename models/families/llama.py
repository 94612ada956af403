"""Llama: pre-norm decoder, rotary attention with grouped key/value heads, gated SiLU feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import (
    GATED_MLP,
    LAYER,
    PRE_NORMS,
    QKVO,
    RMSConfig,
    gated_mlp,
    rms_decoder,
    same_names,
)
from kvgraph.models.rope import read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(RMSConfig):
    """Llama's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
        mlp_bias: Whether the gate, up and down projections have biases.
    """

    attention_bias: bool
    mlp_bias: bool


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """Read a `llama` config.json.

    Defaults are those of transformers' LlamaConfig, and only for keys that published checkpoints leave out.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_common(reader, hidden_act="silu", bos_token_id=1, eos_token_ids=(2,))
    config = LlamaConfig(
        **common,
        rms_norm_eps=reader.number("rms_norm_eps"),
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=reader.flag("mlp_bias", default=False),
        rope=read_rope(reader, common["head_dim"], default_theta=10000.0),
    )
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, LlamaConfig)
    compute, bias = precision.compute, config.attention_bias

    def layer() -> SequentialLayer:
        return SequentialLayer(
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            Attention(config, precision, qkv_bias=bias, out_bias=bias),
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            gated_mlp(config, precision, config.mlp_bias),
        )

    return rms_decoder(
        config,
        precision,
        [CausalMask(), Rotary(config.rope, config.head_dim, compute)],
        [layer() for _ in range(config.num_hidden_layers)],
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    # Old checkpoints carry the rotary table, which the config determines.
    table = f"{LAYER}self_attn.rotary_emb.inv_freq"
    return {**same_names([*PRE_NORMS, *QKVO, *GATED_MLP]), table: None}


FAMILY = Family("llama", config_from_hf, build, weight_names)
