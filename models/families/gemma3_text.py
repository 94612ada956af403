"""Gemma 3, text: normed queries and keys, most layers with a window and a rotary base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.families.gemma import embedding_scale, shifted_norms
from kvgraph.models.families.gemma2 import SANDWICH_NORMS, SandwichLayer
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import FULL, SLIDING, check_window, read_layer_types
from kvgraph.models.layers import NormedAttention, Precision
from kvgraph.models.positions import Rotary, Shared, masks, suffix
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
from kvgraph.models.rope import RopeConfig, read_rope_section


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3TextConfig(RMSConfig):
    """Gemma 3's configuration; `rope` is that of full_attention layers.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
        query_pre_attn_scalar: Scores are divided by its square root, in place of head_dim's.
        final_logit_softcapping: Logits become cap * tanh(logit / cap); None leaves them.
        layer_types: full_attention or sliding_attention, for each layer.
        sliding_window: How many tokens one sees in a sliding layer, itself included.
        sliding_rope: The rotary embedding of sliding_attention layers.
    """

    attention_bias: bool
    query_pre_attn_scalar: float
    final_logit_softcapping: float | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    sliding_rope: RopeConfig

    @property
    def max_positions(self) -> int:
        """The stretched length: Gemma writes it, whatever its rope type."""
        return self.max_position_embeddings


def config_from_hf(hf: Mapping[str, Any]) -> Gemma3TextConfig:
    """Read a `gemma3_text` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf, aliases={"hidden_act": ("hidden_activation",)})
    head_dim = reader.integer("head_dim")
    # Published files leave out that the head is tied.
    common = read_rms(reader, tie_word_embeddings=True)
    layer_types = _read_layer_types(reader, common["num_hidden_layers"])
    sliding_window = reader.optional_integer("sliding_window")
    check_window(reader, layer_types, sliding_window)
    rope, sliding_rope = _read_ropes(reader, head_dim)
    config = Gemma3TextConfig(
        **common,
        attention_bias=reader.flag("attention_bias", default=False),
        query_pre_attn_scalar=reader.number("query_pre_attn_scalar"),
        final_logit_softcapping=reader.optional_number("final_logit_softcapping"),
        layer_types=layer_types,
        sliding_window=sliding_window,
        rope=rope,
        sliding_rope=sliding_rope,
    )
    reader.refuse_unread(config.model_type)
    return config


def _read_layer_types(reader: ConfigReader, num_layers: int) -> tuple[str, ...]:
    """`layer_types`, or every n-th layer full and the others sliding, n the `sliding_window_pattern`."""
    pattern = ("sliding_window_pattern", "_sliding_window_pattern")
    reader.ignore(*pattern)
    types = read_layer_types(reader, num_layers)
    if types is not None:
        return types
    period = reader.integer(*pattern)
    return tuple(SLIDING if layer % period else FULL for layer in range(1, num_layers + 1))


def _read_ropes(reader: ConfigReader, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Those of full and of sliding layers.

    transformers 5 nests both by layer type in `rope_parameters`. Before, `rope_scaling` and `rope_theta` were for full
    layers alone, and sliding ones had `rope_local_base_freq`.
    """
    nested = reader.section("rope_parameters")
    if nested is None:
        full, sliding = reader.section("rope_scaling") or ConfigReader({}), ConfigReader({})
    else:
        sections = [nested.section(layer_type) for layer_type in (FULL, SLIDING)]
        if None in sections or nested.unread():
            raise nested.error(f"expected parameters for {FULL} and {SLIDING} each, and nothing else")
        full, sliding = (section for section in sections if section is not None)
    return (
        read_rope_section(reader, full, head_dim),
        read_rope_section(reader, sliding, head_dim, theta_key="rope_local_base_freq"),
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Gemma3TextConfig)
    compute, bias = precision.compute, config.attention_bias

    def layer(layer_type: str) -> SandwichLayer:
        attention = NormedAttention(
            config,
            precision,
            qkv_bias=bias,
            out_bias=bias,
            norm_eps=config.rms_norm_eps,
            scale=config.query_pre_attn_scalar**-0.5,
        )
        names = tuple(f"{name}{suffix(layer_type)}" for name in ("mask", "cos", "sin"))
        mlp = gated_mlp(config, precision)
        return SandwichLayer(config, precision, attention, mlp, kind=layer_type, shared=names)

    ropes = {FULL: config.rope, SLIDING: config.sliding_rope}
    shared: list[Shared] = [*masks(config.layer_types, config.sliding_window)]
    for layer_type in sorted(set(config.layer_types)):
        shared.append(Rotary(ropes[layer_type], config.head_dim, compute, suffix(layer_type)))
    return rms_decoder(
        config,
        precision,
        shared,
        [layer(layer_type) for layer_type in config.layer_types],
        embedding_scale=embedding_scale(config.hidden_size, compute),
        logit_softcap=config.final_logit_softcapping,
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own; norms get their one added."""
    return {**same_names([*QKVO, *GATED_MLP]), **shifted_norms([*SANDWICH_NORMS, *HEAD_NORMS])}


FAMILY = Family("gemma3_text", config_from_hf, build, weight_names)
