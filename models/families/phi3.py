"""Phi-3 and Phi-4-mini: fused projections in the checkpoint, longrope, and a rotation of part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into, Part
from kvgraph.models.fused_qkv import qkv_parts, stacked_ranges
from kvgraph.models.layer_types import FULL, SLIDING
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import Rotary, Shared, masks, suffix
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import (
    LAYER,
    PRE_NORMS,
    RMSConfig,
    gated_mlp,
    read_rms,
    rms_decoder,
    same_names,
)
from kvgraph.models.rope import read_partial_rope

# What the class implements; the first releases call longrope by the initials of its paper's title.
ROPE_TYPES = {"default": "default", "longrope": "longrope", "su": "longrope"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(RMSConfig):
    """Phi-3's configuration.

    Attributes:
        sliding_window: How many tokens one sees, itself included; None for all before it.
        rotary_dim: How many dimensions of a head are rotated, the first ones.
    """

    sliding_window: int | None
    rotary_dim: int


def config_from_hf(hf: Mapping[str, Any]) -> Phi3Config:
    """Read a `phi3` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(_with_known_rope_types(hf))
    common = read_rms(reader)
    reader.refuse_unstated("sliding_window")
    rope, rotary_dim = read_partial_rope(reader, common["head_dim"], default_factor=1.0)
    config = Phi3Config(
        **common,
        sliding_window=reader.optional_integer("sliding_window"),
        rope=rope,
        rotary_dim=rotary_dim,
    )
    _accept_own_code(reader)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        reader.require(key, False, "the class has no biases")
    for key in ("full_attn_mod", "interpolate_factor"):
        reader.require(key, 1, "it is written by published files and read by nothing")
    reader.refuse_unread(config.model_type)
    return config


def _with_known_rope_types(hf: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with rope types by their present names; others are refused, for Phi-3 gave them other formulas."""
    known = dict(hf)
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(hf.get(name), Mapping):
            continue
        known[name] = dict(hf[name])
        for key in ("rope_type", "type"):
            rope_type = hf[name].get(key)
            if rope_type is not None and rope_type not in ROPE_TYPES:
                raise ValueError(
                    f"config.json: {name}: {key} {rope_type!r} is not implemented for model_type 'phi3'; "
                    f"known: {', '.join(ROPE_TYPES)}"
                )
            if rope_type is not None:
                known[name][key] = ROPE_TYPES[rope_type]
    return known


def _accept_own_code(reader: ConfigReader) -> None:
    """Published files name modelling code of their own, older than the library's; it is the same model."""
    code = reader.section("auto_map")
    if code is None:
        return
    code.ignore("AutoTokenizer")
    for key, module in (("AutoConfig", "configuration_phi3."), ("AutoModelForCausalLM", "modeling_phi3.")):
        if not code.text(key, default=module).split("--")[-1].startswith(module):
            raise code.error(
                f"{key} is {code.value(key)!r}, expected Phi-3's own, {module}*; it is never run"
            )
    if unread := code.unread():
        raise code.error(f"names code for {', '.join(sorted(unread))}, which is never run")


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Phi3Config)
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
        Rotary(config.rope, config.rotary_dim, compute),
    ]
    return rms_decoder(config, precision, shared, [layer() for _ in range(config.num_hidden_layers)])


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Queries, keys and values lie behind one another in one tensor, gate and up projection in another."""
    width = config.intermediate_size
    return {
        **same_names([*PRE_NORMS, "self_attn.o_proj", "mlp.down_proj"]),
        f"{LAYER}self_attn.qkv_proj.weight": qkv_parts(stacked_ranges(config), LAYER, "weight"),
        f"{LAYER}mlp.gate_up_proj.weight": (
            Part(f"{LAYER}mlp.gate_proj.weight", ((0, width),)),
            Part(f"{LAYER}mlp.up_proj.weight", ((width, 2 * width),)),
        ),
    }


FAMILY = Family("phi3", config_from_hf, build, weight_names)
