"""SmolLM3: Llama in which every so many layers have no positions, and those may have a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import FULL, SLIDING, check_window, read_layer_types
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
class SmolLM3Config(RMSConfig):
    """SmolLM3's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
        mlp_bias: Whether the gate, up and down projections have biases.
        no_rope_layers: 1 for a layer that rotates queries and keys, 0 for one that does not.
        layer_types: full_attention or sliding_attention, for each layer.
        sliding_window: How many tokens one sees in a sliding layer, itself included.
    """

    attention_bias: bool
    mlp_bias: bool
    no_rope_layers: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None


def config_from_hf(hf: Mapping[str, Any]) -> SmolLM3Config:
    """Read a `smollm3` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    # Published files leave out that the head is tied.
    common = read_rms(reader, tie_word_embeddings=True)
    no_rope_layers = _read_no_rope_layers(reader, common["num_hidden_layers"])
    layer_types, sliding_window = _read_windows(reader, no_rope_layers)
    config = SmolLM3Config(
        **common,
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=reader.flag("mlp_bias", default=False),
        no_rope_layers=no_rope_layers,
        layer_types=layer_types,
        sliding_window=sliding_window,
        rope=read_rope(reader, common["head_dim"]),
    )
    # Written by the class that this one was made from.
    reader.ignore("max_window_layers")
    reader.refuse_unread(config.model_type)
    return config


def _read_no_rope_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`no_rope_layers`, or every n-th layer without positions, n the `no_rope_layer_interval`."""
    reader.ignore("no_rope_layer_interval")
    rotated = reader.sequence("no_rope_layers", num_layers, (0, 1))
    if rotated is not None:
        return tuple(int(flag) for flag in rotated)
    interval = reader.integer("no_rope_layer_interval")
    return tuple(int(layer % interval != 0) for layer in range(1, num_layers + 1))


def _read_windows(
    reader: ConfigReader, no_rope_layers: tuple[int, ...]
) -> tuple[tuple[str, ...], int | None]:
    """`layer_types` and the window, which by default is that of the layers without positions."""
    window = reader.optional_integer("sliding_window")
    if not reader.flag("use_sliding_window", default=False):
        window = None
    without_positions = FULL if window is None else SLIDING
    types = read_layer_types(reader, len(no_rope_layers)) or tuple(
        FULL if rotated else without_positions for rotated in no_rope_layers
    )
    check_window(reader, types, window)
    return types, window


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, SmolLM3Config)
    compute = precision.compute

    def layer(layer_type: str, rotated: int) -> SequentialLayer:
        mask = f"mask{suffix(layer_type)}"
        return SequentialLayer(
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            Attention(config, precision, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            gated_mlp(config, precision, config.mlp_bias),
            kind=layer_type if rotated else f"{layer_type} without positions",
            shared=(mask, "cos", "sin") if rotated else (mask,),
        )

    shared: list[Shared] = [*masks(config.layer_types, config.sliding_window)]
    if any(config.no_rope_layers):
        shared.append(Rotary(config.rope, config.head_dim, compute))
    layers = map(layer, config.layer_types, config.no_rope_layers)
    return rms_decoder(config, precision, shared, list(layers))


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    return same_names([*PRE_NORMS, *QKVO, *GATED_MLP])


FAMILY = Family("smollm3", config_from_hf, build, weight_names)
