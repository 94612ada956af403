"""Rotary position embedding: what a config.json says of it, in any spelling.

| rope_type | inverse frequency of pair i, with f = theta ** (-2i / D) |
|---|---|
| default | f |
| linear | f / factor: positions are squeezed into the trained range |
| dynamic | f with a larger theta, once the sequence is longer than the trained length |
| llama3 | f where the wavelength is short, f / factor where it is long, a blend between |
| yarn | the same idea, with the blend linear in i; cos and sin are scaled by an attention factor |
| longrope | f / (a factor for each i), one list up to the trained length and one beyond; an attention factor as well |

D is the number of rotated dimensions of a head. `kvgraph.models.rope_frequencies` holds the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config_reader import ConfigReader

# Its formula takes a power of D / (D - 2).
MIN_DYNAMIC_DIM = 4
ORIGINAL_LENGTH = "original_max_position_embeddings"
# Types whose frequencies depend on a row's total length.
LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary embedding of a model, whatever spelling its config.json used.

    Attributes:
        rope_type: default, linear, dynamic, llama3, yarn or longrope.
        rope_theta: Base of the frequencies.
        factor: How far the trained range is stretched; None for default.
        low_freq_factor: llama3: wavelengths above original / this are divided by `factor`.
        high_freq_factor: llama3: wavelengths below original / this are kept.
        original_max_position_embeddings: The trained length; None for default and linear.
        attention_factor: What cos and sin are multiplied by.
        beta_fast: yarn: pairs that turn at least so often within the trained length are kept.
        beta_slow: yarn: pairs that turn at most so often are divided by `factor`.
        truncate: yarn: whether the two ends of the blend are moved out to whole pairs.
        short_factor: longrope: divisor of every pair's frequency up to the trained length.
        long_factor: longrope: the same beyond it.
    """

    rope_type: str
    rope_theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float = 1.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies depend on a row's total length, so that graphs take `new_length`."""
        return self.rope_type in LENGTH_DEPENDENT

    def stretched(self, max_position_embeddings: int) -> int:
        """Positions that a sequence may have: some types stretch beyond `max_position_embeddings`."""
        if self.factor is None:
            return max_position_embeddings
        if self.rope_type in ("linear", "dynamic"):
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            assert self.original_max_position_embeddings is not None
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return max_position_embeddings

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], rotary_dim: int, *, default_theta: float | None = None
    ) -> RopeConfig:
        """The rotary embedding that a config.json asks for; see `read_rope`."""
        return read_rope(ConfigReader(hf), rotary_dim, default_theta=default_theta)


def read_rope(reader: ConfigReader, rotary_dim: int, *, default_theta: float | None = None) -> RopeConfig:
    """Take the rotary keys out of `reader`, for a family whose layers all rotate whole heads alike.

    Known spellings: `rope_parameters` (transformers 5) and `rope_scaling`, `rope_type` and `type`, theta and the
    original length in that object or beside it.

    Args:
        reader: config.json.
        rotary_dim: Number of rotated dimensions of a head.
        default_theta: Theta where the file names none; None makes that an error.

    Raises:
        ValueError: An unknown rope type or parameter, a missing parameter, or two spellings that disagree.
    """
    return read_rope_section(reader, rope_section(reader), rotary_dim, default_theta=default_theta)


def read_partial_rope(
    reader: ConfigReader,
    head_dim: int,
    *,
    default_theta: float | None = None,
    default_factor: float | None = None,
) -> tuple[RopeConfig, int]:
    """The same for a family that may rotate only the first part of each head.

    Args:
        reader: config.json.
        head_dim: D.
        default_theta: As for `read_rope`.
        default_factor: `partial_rotary_factor` where the file names none; None makes that an error.

    Returns:
        The embedding, and how many dimensions of a head it rotates.

    Raises:
        ValueError: As for `read_rope`, or a factor that leaves nothing to rotate or more than there is.
    """
    section, key = rope_section(reader), "partial_rotary_factor"
    factor = _inner_or_outer(reader, section, key).number(key, default=default_factor)
    if factor > 1:
        raise reader.error(f"{key} is {factor}, expected at most 1")
    rotary_dim = int(head_dim * factor)
    return read_rope_section(reader, section, rotary_dim, default_theta=default_theta), rotary_dim


def rope_section(reader: ConfigReader) -> ConfigReader:
    """The object of rotary parameters; an empty one where the file has none."""
    return reader.section("rope_parameters", "rope_scaling") or ConfigReader({})


def read_rope_section(
    reader: ConfigReader,
    section: ConfigReader,
    rotary_dim: int,
    *,
    theta_key: str = "rope_theta",
    default_theta: float | None = None,
) -> RopeConfig:
    """The embedding that one object of rotary parameters describes; see `read_rope`.

    Args:
        reader: config.json, for what may stand beside the object.
        section: The object.
        rotary_dim: Number of rotated dimensions of a head.
        theta_key: Name of theta beside the object.
        default_theta: As for `read_rope`.
    """
    _refuse_layer_types(section)
    rope_type = section.text("rope_type", "type", default="default")
    if rope_type not in READERS:
        raise section.error(f"rope_type {rope_type!r} is not implemented; known: {', '.join(READERS)}")
    minimum = MIN_DYNAMIC_DIM if rope_type == "dynamic" else 2
    if rotary_dim < minimum or rotary_dim % 2:
        raise reader.error(
            f"{rotary_dim} dimensions of a head are to be rotated, expected an even number of at least {minimum} "
            f"for {rope_type} rope (head_dim, or its partial_rotary_factor)"
        )
    theta = _read_theta(reader, section, theta_key, default_theta)
    parameters = READERS[rope_type](reader, section)
    if unread := _without_effect_removed(section.unread()):
        raise section.error(f"unknown parameters for rope_type {rope_type!r}: {', '.join(sorted(unread))}")
    rope = RopeConfig(rope_type, theta, **parameters)
    for key, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
        if factors is not None and len(factors) != rotary_dim // 2:
            raise section.error(f"{key} has {len(factors)} numbers, expected {rotary_dim // 2}, one a pair")
    return rope


def _read_default(reader: ConfigReader, section: ConfigReader) -> dict[str, Any]:
    # Written at the top level by families that may also be longrope; without effect here.
    reader.value(ORIGINAL_LENGTH)
    return {}


def _read_linear(reader: ConfigReader, section: ConfigReader) -> dict[str, Any]:
    reader.value(ORIGINAL_LENGTH)
    return {"factor": section.number("factor")}


def _read_dynamic(reader: ConfigReader, section: ConfigReader) -> dict[str, Any]:
    # transformers stretches from max_position_embeddings, whatever the original length says.
    reader.value(ORIGINAL_LENGTH)
    section.value(ORIGINAL_LENGTH)
    return {"factor": section.number("factor"), ORIGINAL_LENGTH: reader.integer("max_position_embeddings")}


def _read_llama3(reader: ConfigReader, section: ConfigReader) -> dict[str, Any]:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.error(f"high_freq_factor is {high}, expected more than low_freq_factor {low}")
    return {
        "factor": section.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        ORIGINAL_LENGTH: _read_original_length(reader, section),
    }


def _read_yarn(reader: ConfigReader, section: ConfigReader) -> dict[str, Any]:
    factor = section.number("factor")
    mscale, mscale_all_dim = section.optional_number("mscale"), section.optional_number("mscale_all_dim")
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_scale(factor, 1.0)
        if mscale is not None and mscale_all_dim is not None:
            attention_factor = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return {
        "factor": factor,
        ORIGINAL_LENGTH: _read_original_length(reader, section),
        "attention_factor": attention_factor,
        # The paper's values, which configs leave out.
        "beta_fast": section.number("beta_fast", default=32.0),
        "beta_slow": section.number("beta_slow", default=1.0),
        "truncate": section.flag("truncate", default=True),
    }


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_longrope(reader: ConfigReader, section: ConfigReader) -> dict[str, Any]:
    original = _read_original_length(reader, section)
    factor = section.optional_number("factor")
    if factor is None:
        factor = reader.integer("max_position_embeddings") / original
    attention_factor = section.optional_number("attention_factor")
    if attention_factor is None:
        stretched = factor > 1
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
    return {
        "factor": factor,
        ORIGINAL_LENGTH: original,
        "attention_factor": attention_factor,
        "short_factor": section.numbers("short_factor"),
        "long_factor": section.numbers("long_factor"),
    }


# rope_type -> what reads the parameters it has beside theta, out of config.json and the object.
READERS: Mapping[str, Callable[[ConfigReader, ConfigReader], dict[str, Any]]] = {
    "default": _read_default,
    "linear": _read_linear,
    "dynamic": _read_dynamic,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
    "longrope": _read_longrope,
}


def _inner_or_outer(
    reader: ConfigReader, section: ConfigReader, key: str, outer_key: str = ""
) -> ConfigReader:
    """Where a key that may stand in the object or beside it stands; both is well where they agree."""
    inner, outer = section.value(key), reader.value(outer_key or key)
    if inner is not None and outer is not None and inner != outer:
        raise reader.error(
            f"{outer_key or key} is {outer!r} but {inner!r} among the rope parameters; remove one"
        )
    return reader if inner is None and outer is not None else section


def _read_theta(reader: ConfigReader, section: ConfigReader, key: str, default: float | None) -> float:
    _inner_or_outer(reader, section, "rope_theta", key)
    inner = section.has("rope_theta")
    return section.number("rope_theta") if inner else reader.number(key, default=default)


def _read_original_length(reader: ConfigReader, section: ConfigReader) -> int:
    return _inner_or_outer(reader, section, ORIGINAL_LENGTH).integer(ORIGINAL_LENGTH, minimum=2)


def _refuse_layer_types(section: ConfigReader) -> None:
    nested = sorted(key for key, value in section.unread().items() if isinstance(value, dict))
    if nested:
        raise section.error(
            f"has parameters per layer type ({', '.join(nested)}), but this family has one type of layer"
        )


def _without_effect_removed(unread: Mapping[str, Any]) -> dict[str, Any]:
    """What is left when parameters that are written out at their neutral value are taken away."""
    neutral = {"partial_rotary_factor": 1.0, "attention_factor": 1.0}
    return {key: value for key, value in unread.items() if key not in neutral or value != neutral[key]}
