"""Qwen 1.5 and 2 with experts: Qwen 2's attention, a choice of experts, and one expert that every token uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.experts import expert_names
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import FULL, check_window, read_layer_types
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import Rotary, Shared, masks, suffix
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import GATED_MLP, LAYER, PRE_NORMS, QKVO, rms_decoder, same_names
from kvgraph.models.rope import read_rope
from kvgraph.models.sparse_layers import SparseConfig, feed_forward, read_sparse


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(SparseConfig):
    """Qwen2-MoE's configuration.

    Attributes:
        qkv_bias: Whether the q, k and v projections have biases.
        shared_expert_intermediate_size: Width of the expert that every token uses.
        layer_types: full_attention or sliding_attention, for each layer.
        sliding_window: How many tokens one sees in a sliding layer, itself included.
    """

    qkv_bias: bool
    shared_expert_intermediate_size: int
    layer_types: tuple[str, ...]
    sliding_window: int | None


def config_from_hf(hf: Mapping[str, Any]) -> Qwen2MoeConfig:
    """Read a `qwen2_moe` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_sparse(reader)
    layer_types, sliding_window = _read_windows(reader, common["num_hidden_layers"])
    config = Qwen2MoeConfig(
        **common,
        qkv_bias=reader.flag("qkv_bias", default=True),
        shared_expert_intermediate_size=reader.integer("shared_expert_intermediate_size"),
        layer_types=layer_types,
        sliding_window=sliding_window,
        rope=read_rope(reader, common["head_dim"]),
    )
    reader.refuse_unread(config.model_type)
    return config


def _read_windows(reader: ConfigReader, num_layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layer types and window; the window is off unless `use_sliding_window`, whatever `sliding_window` says."""
    types = read_layer_types(reader, num_layers)
    reader.ignore("sliding_window", "max_window_layers")
    window = None
    if reader.flag("use_sliding_window", default=False):
        window = reader.integer("sliding_window")
        if types is None:
            raise reader.error(
                "use_sliding_window is true and layer_types is missing: versions of transformers differ in which "
                "layers slide then; say it in layer_types"
            )
    types = types or (FULL,) * num_layers
    check_window(reader, types, window)
    return types, window


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Qwen2MoeConfig)
    compute = precision.compute

    def layer(index: int, layer_type: str) -> SequentialLayer:
        return SequentialLayer(
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            Attention(config, precision, qkv_bias=config.qkv_bias, out_bias=False),
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            feed_forward(config, precision, index, config.shared_expert_intermediate_size),
            kind=f"{layer_type}, experts" if config.has_experts(index) else layer_type,
            shared=(f"mask{suffix(layer_type)}", "cos", "sin"),
        )

    shared: list[Shared] = [
        *masks(config.layer_types, config.sliding_window),
        Rotary(config.rope, config.head_dim, compute),
    ]
    return rms_decoder(config, precision, shared, [layer(*pair) for pair in enumerate(config.layer_types)])


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own, save that the experts stand one by one."""
    shared = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    names = same_names([*PRE_NORMS, *QKVO, *GATED_MLP, *shared, "mlp.shared_expert_gate"])
    return {**names, **expert_names(f"{LAYER}mlp")}


FAMILY = Family("qwen2_moe", config_from_hf, build, weight_names)
