"""Rotary position embedding: which frequencies the D/2 pairs of a head turn with.

| rope_type | inverse frequency of pair i, with f = theta ** (-2i / D) |
|---|---|
| default | f |
| linear | f / factor: positions are squeezed into the trained range |
| dynamic | f with a larger theta, once the sequence is longer than the trained length |
| llama3 | f where the wavelength is short, f / factor where it is long, a blend between |

`default`, `linear` and `llama3` are constants of a model. `dynamic` depends on the total length of each row, so its
frequencies are computed in the graph.

Everything is float32, in the order in which the published formulas round: at position 100 000 one unit in the last
place of a frequency is already visible in the angle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvgraph.models.config_reader import ConfigReader

# Parameters that each rope type has beside its theta.
ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Its formula takes a power of D / (D - 2).
MIN_DYNAMIC_HEAD_DIM = 4


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a model, whatever spelling its config.json used.

    Attributes:
        rope_type: A key of `ROPE_PARAMETERS`.
        rope_theta: Base of the frequencies.
        factor: How far the trained range is stretched; None for default.
        low_freq_factor: llama3: wavelengths above original / this are divided by `factor`.
        high_freq_factor: llama3: wavelengths below original / this are kept.
        original_max_position_embeddings: The trained length, for dynamic and llama3.
        attention_factor: What cos and sin are multiplied by; 1 for these types.
    """

    rope_type: str
    rope_theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float = 1.0

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on a row's total length, so that graphs take `new_length`."""
        return self.rope_type == "dynamic"

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], head_dim: int, *, default_theta: float | None = None
    ) -> RopeConfig:
        """The rotary embedding that a config.json asks for.

        Args:
            hf: config.json.
            head_dim: Number of rotated dimensions of a head.
            default_theta: Theta where the file names none; None makes that an error.

        Raises:
            ValueError: An unknown rope type or parameter, a missing parameter, or two spellings that disagree.
        """
        return read_rope(ConfigReader(hf), head_dim, default_theta=default_theta)


def read_rope(reader: ConfigReader, head_dim: int, *, default_theta: float | None = None) -> RopeConfig:
    """Take the rotary keys out of `reader`; see `RopeConfig.from_hf`.

    Known spellings: `rope_parameters` (transformers 5) and `rope_scaling`, `rope_type` and `type`, theta and the
    original length in that object or beside it.
    """
    scaling = reader.section("rope_parameters", "rope_scaling") or ConfigReader({})
    _refuse_layer_types(scaling)
    rope_type = scaling.text("rope_type", "type", default="default")
    if rope_type not in ROPE_PARAMETERS:
        raise scaling.error(
            f"rope_type {rope_type!r} is not implemented; known: {', '.join(ROPE_PARAMETERS)}"
        )
    theta = _read_theta(reader, scaling, default_theta)
    original = _read_original_length(reader, scaling, rope_type)
    parameters = {
        key: scaling.number(key)
        for key in ROPE_PARAMETERS[rope_type]
        if key != "original_max_position_embeddings"
    }
    rope = RopeConfig(rope_type, theta, original_max_position_embeddings=original, **parameters)
    if rope.rope_type == "llama3" and parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise scaling.error(
            f"high_freq_factor is {rope.high_freq_factor}, expected more than low_freq_factor {rope.low_freq_factor}"
        )
    minimum = MIN_DYNAMIC_HEAD_DIM if rope.rope_type == "dynamic" else 2
    if head_dim < minimum or head_dim % 2:
        raise reader.error(
            f"head_dim is {head_dim}, expected an even number of at least {minimum} for {rope_type} rope"
        )
    if unread := _without_effect_removed(scaling.unread()):
        raise scaling.error(f"unknown parameters for rope_type {rope_type!r}: {', '.join(sorted(unread))}")
    return rope


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Inverse frequencies [D/2] float32 of a type that does not depend on the length.

    Raises:
        ValueError: The type is `dynamic`.
    """
    if rope.depends_on_length:
        raise ValueError(
            f"{rope.rope_type} rope depends on the total length; use dynamic_inverse_frequencies"
        )
    base = 1.0 / rope.rope_theta ** _exponents(head_dim)
    if rope.rope_type == "linear":
        assert rope.factor is not None
        return base / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, base)
    return base


def dynamic_inverse_frequencies(rope: RopeConfig, head_dim: int, total_length: torch.Tensor) -> torch.Tensor:
    """Inverse frequencies [B, D/2] float32 of `dynamic` rope, traceable by torch.export.

    Args:
        rope: A rope of type `dynamic`.
        head_dim: D.
        total_length: [B] int64, tokens of each row in all; up to the trained length the frequencies are those of
            `default`.
    """
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    trained = rope.original_max_position_embeddings
    length = total_length.clamp(min=trained).to(torch.float32)
    stretch = rope.factor * length / trained - (rope.factor - 1)
    theta = rope.rope_theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / theta.unsqueeze(-1) ** _exponents(head_dim)


def _exponents(head_dim: int) -> torch.Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    assert rope.factor is not None
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    trained, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / base
    # 0 at the longest wavelength of the blend, 1 at the shortest.
    kept = (trained / wavelength - low) / (high - low)
    blended = (1 - kept) * base / rope.factor + kept * base
    result = torch.where(wavelength > trained / low, base / rope.factor, blended)
    return torch.where(wavelength < trained / high, base, result)


def _read_theta(reader: ConfigReader, scaling: ConfigReader, default: float | None) -> float:
    inner, outer = scaling.value("rope_theta"), reader.value("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise reader.error(f"rope_theta is {outer!r} but {inner!r} among the rope parameters; remove one")
    return scaling.number("rope_theta") if inner is not None else reader.number("rope_theta", default=default)


def _read_original_length(reader: ConfigReader, scaling: ConfigReader, rope_type: str) -> int | None:
    key = "original_max_position_embeddings"
    inner, outer = scaling.value(key), reader.value(key)
    if rope_type == "dynamic":
        # transformers stretches from max_position_embeddings, whatever the original length says.
        return reader.integer("max_position_embeddings")
    if rope_type != "llama3":
        return None
    if inner is not None and outer is not None and inner != outer:
        raise reader.error(f"{key} is {outer!r} but {inner!r} among the rope parameters; remove one")
    return (reader if inner is None and outer is not None else scaling).integer(key)


def _refuse_layer_types(scaling: ConfigReader) -> None:
    nested = sorted(key for key, value in scaling.unread().items() if isinstance(value, dict))
    if nested:
        raise scaling.error(
            f"has parameters per layer type ({', '.join(nested)}), but this family has one type of layer"
        )


def _without_effect_removed(unread: Mapping[str, Any]) -> dict[str, Any]:
    """What is left when parameters that are written out at their neutral value are taken away."""
    neutral = {"partial_rotary_factor": 1.0, "attention_factor": 1.0}
    return {key: value for key, value in unread.items() if key not in neutral or value != neutral[key]}
