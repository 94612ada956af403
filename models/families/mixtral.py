"""Mixtral: Mistral with a choice of experts in the place of the feed-forward part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.experts import Experts, ExpertsMLP, Router, expert_names, read_top_k
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import FULL, SLIDING
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import Rotary, Shared, masks, suffix
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import LAYER, PRE_NORMS, QKVO, RMSConfig, read_rms, rms_decoder, same_names
from kvgraph.models.rope import read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(RMSConfig):
    """Mixtral's configuration; `intermediate_size` is the width of an expert.

    Attributes:
        sliding_window: How many tokens one sees, itself included; None for all before it.
        num_local_experts: Experts of a layer.
        num_experts_per_tok: How many of them a token uses.
    """

    sliding_window: int | None
    num_local_experts: int
    num_experts_per_tok: int


def config_from_hf(hf: Mapping[str, Any]) -> MixtralConfig:
    """Read a `mixtral` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_rms(reader)
    num_experts = reader.integer("num_local_experts", "num_experts")
    config = MixtralConfig(
        **common,
        sliding_window=reader.optional_integer("sliding_window"),
        num_local_experts=num_experts,
        num_experts_per_tok=read_top_k(reader, num_experts),
        rope=read_rope(reader, common["head_dim"]),
    )
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, MixtralConfig)
    compute, size = precision.compute, config.hidden_size
    num_experts, top_k = config.num_local_experts, config.num_experts_per_tok
    layer_type = FULL if config.sliding_window is None else SLIDING

    def layer() -> SequentialLayer:
        return SequentialLayer(
            RMSNorm(size, config.rms_norm_eps, compute),
            Attention(config, precision, qkv_bias=False, out_bias=False),
            RMSNorm(size, config.rms_norm_eps, compute),
            ExpertsMLP(
                Router(size, num_experts, top_k, normalized=True),
                Experts(num_experts, size, config.intermediate_size, config.hidden_act, precision),
            ),
            kind=layer_type,
            shared=(f"mask{suffix(layer_type)}", "cos", "sin"),
        )

    shared: list[Shared] = [
        *masks([layer_type], config.sliding_window),
        Rotary(config.rope, config.head_dim, compute),
    ]
    return rms_decoder(config, precision, shared, [layer() for _ in range(config.num_hidden_layers)])


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The experts stand one by one; w1 is the gate, w3 the up and w2 the down projection."""
    experts = expert_names(f"{LAYER}block_sparse_moe", gate="w1", up="w3", down="w2")
    return {**same_names([*PRE_NORMS, *QKVO]), **experts}


FAMILY = Family("mixtral", config_from_hf, build, weight_names)
