"""Qwen 3 with experts: Qwen 3's attention, and a choice of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.experts import expert_names
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import FULL, SLIDING
from kvgraph.models.layers import NormedAttention, Precision, RMSNorm
from kvgraph.models.positions import Rotary, Shared, masks, suffix
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import GATED_MLP, HEAD_NORMS, LAYER, PRE_NORMS, QKVO, rms_decoder, same_names
from kvgraph.models.rope import read_rope
from kvgraph.models.sparse_layers import SparseConfig, feed_forward, read_sparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(SparseConfig):
    """Qwen3-MoE's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
        sliding_window: How many tokens one sees, itself included; None for all before it.
    """

    attention_bias: bool
    sliding_window: int | None


def config_from_hf(hf: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Read a `qwen3_moe` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_sparse(reader)
    config = Qwen3MoeConfig(
        **common,
        attention_bias=reader.flag("attention_bias", default=False),
        sliding_window=_read_window(reader),
        rope=read_rope(reader, common["head_dim"]),
    )
    reader.refuse_unread(config.model_type)
    return config


def _read_window(reader: ConfigReader) -> int | None:
    """The window of every layer; None unless `use_sliding_window`."""
    if not reader.flag("use_sliding_window", default=False):
        reader.ignore("sliding_window", "max_window_layers")
        return None
    if reader.has("max_window_layers"):
        raise reader.error(
            "use_sliding_window is true and max_window_layers is set: versions of transformers differ in which "
            "layers slide then; remove max_window_layers for all of them"
        )
    return reader.integer("sliding_window")


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Qwen3MoeConfig)
    compute = precision.compute
    layer_type = FULL if config.sliding_window is None else SLIDING

    def layer(index: int) -> SequentialLayer:
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
            feed_forward(config, precision, index),
            kind=f"{layer_type}, experts" if config.has_experts(index) else layer_type,
            shared=(f"mask{suffix(layer_type)}", "cos", "sin"),
        )

    shared: list[Shared] = [
        *masks([layer_type], config.sliding_window),
        Rotary(config.rope, config.head_dim, compute),
    ]
    return rms_decoder(config, precision, shared, [layer(i) for i in range(config.num_hidden_layers)])


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own, save that the experts stand one by one."""
    names = same_names([*PRE_NORMS, *QKVO, *HEAD_NORMS, *GATED_MLP])
    return {**names, **expert_names(f"{LAYER}mlp")}


FAMILY = Family("qwen3_moe", config_from_hf, build, weight_names)
