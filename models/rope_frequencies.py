"""The frequencies that the pairs of a head turn with, for every type of rotary embedding.

Everything is float32, in the order in which the published formulas round: at position 100 000 one unit in the last
place of a frequency is already visible in the angle.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvgraph.models.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Inverse frequencies [D/2] float32 of a type that does not depend on the length.

    Args:
        rope: The embedding.
        rotary_dim: D, number of rotated dimensions of a head.

    Raises:
        ValueError: The type does.
    """
    if rope.depends_on_length:
        raise ValueError(
            f"{rope.rope_type} rope depends on the total length; use {rope.rope_type}_inverse_frequencies"
        )
    wavelength = rope.rope_theta ** _exponents(rotary_dim)
    if rope.rope_type == "linear":
        assert rope.factor is not None
        return 1.0 / wavelength / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, 1.0 / wavelength)
    if rope.rope_type == "yarn":
        return _yarn(rope, wavelength, rotary_dim)
    return 1.0 / wavelength


def dynamic_inverse_frequencies(rope: RopeConfig, rotary_dim: int, total_length: Tensor) -> Tensor:
    """Inverse frequencies [B, D/2] float32 of `dynamic` rope, traceable by torch.export.

    Args:
        rope: A rope of type `dynamic`.
        rotary_dim: D.
        total_length: [B] int64, tokens of each row in all; up to the trained length the frequencies are those of
            `default`.
    """
    assert rope.factor is not None
    assert rope.original_max_position_embeddings is not None
    trained = rope.original_max_position_embeddings
    length = total_length.clamp(min=trained).to(torch.float32)
    stretch = rope.factor * length / trained - (rope.factor - 1)
    theta = rope.rope_theta * stretch ** (rotary_dim / (rotary_dim - 2))
    return 1.0 / theta.unsqueeze(-1) ** _exponents(rotary_dim)


def longrope_inverse_frequencies(rope: RopeConfig, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Inverse frequencies of `longrope`, [D/2] float32 each: up to the trained length, and beyond it."""
    assert rope.short_factor is not None
    assert rope.long_factor is not None
    wavelength = rope.rope_theta ** _exponents(rotary_dim)
    short, long = (
        1.0 / (torch.tensor(factors, dtype=torch.float32) * wavelength)
        for factors in (rope.short_factor, rope.long_factor)
    )
    return short, long


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim


def _llama3(rope: RopeConfig, base: Tensor) -> Tensor:
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


def _yarn(rope: RopeConfig, wavelength: Tensor, rotary_dim: int) -> Tensor:
    assert rope.factor is not None
    assert rope.beta_fast is not None
    assert rope.beta_slow is not None
    first, last = _turning(rope, rope.beta_fast, rotary_dim), _turning(rope, rope.beta_slow, rotary_dim)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    if first == last:
        last += 0.001
    # 0 up to the first pair of the blend, 1 from the last.
    divided = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - divided
    return 1.0 / (rope.factor * wavelength) * (1 - kept) + 1.0 / wavelength * kept


def _turning(rope: RopeConfig, turns: float, rotary_dim: int) -> float:
    """The pair, as a fraction, that turns so often within the trained length."""
    assert rope.original_max_position_embeddings is not None
    radians = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return rotary_dim * math.log(radians) / (2 * math.log(rope.rope_theta))
