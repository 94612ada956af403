"""Mistral: Llama without biases, where every token may see a window of the last tokens alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import FULL, SLIDING
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import Rotary, Shared, masks, suffix
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
class MistralConfig(RMSConfig):
    """Mistral's configuration.

    Attributes:
        sliding_window: How many tokens one sees, itself included; None for all before it.
    """

    sliding_window: int | None


def config_from_hf(hf: Mapping[str, Any]) -> MistralConfig:
    """Read a `mistral` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_rms(reader)
    # transformers takes an absent window for 4096, others for none.
    reader.refuse_unstated("sliding_window")
    config = MistralConfig(
        **common,
        sliding_window=reader.optional_integer("sliding_window"),
        rope=read_rope(reader, common["head_dim"]),
    )
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, MistralConfig)
    compute = precision.compute
    layer_type = FULL if config.sliding_window is None else SLIDING

    def layer() -> SequentialLayer:
        return SequentialLayer(
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            Attention(config, precision, qkv_bias=False, out_bias=False),
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            gated_mlp(config, precision),
            kind=layer_type,
            shared=(f"mask{suffix(layer_type)}", "cos", "sin"),
        )

    shared: list[Shared] = [
        *masks([layer_type], config.sliding_window),
        Rotary(config.rope, config.head_dim, compute),
    ]
    return rms_decoder(config, precision, shared, [layer() for _ in range(config.num_hidden_layers)])


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    return same_names([*PRE_NORMS, *QKVO, *GATED_MLP])


FAMILY = Family("mistral", config_from_hf, build, weight_names)
