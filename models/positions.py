"""What all layers of a kind share at a step, computed from positions alone: rotary angles and masks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvgraph.models.rope import RopeConfig
from kvgraph.models.rope_frequencies import (
    dynamic_inverse_frequencies,
    inverse_frequencies,
    longrope_inverse_frequencies,
)


class Step(NamedTuple):
    """Where the new tokens stand.

    Attributes:
        positions: [B, S] int64.
        slots: [T] int64, 0 ... T - 1; slot j of the cache holds the token at position j.
        total_length: [B] int64, tokens of each row when the step is done; None unless something depends on it.
        constants: Tensors that the config determines, by name.
    """

    positions: Tensor
    slots: Tensor
    total_length: Tensor | None
    constants: Mapping[str, Tensor]


class Shared(Protocol):
    """Something that layers share.

    Attributes:
        names: What it gives, by name.
        constants: What it needs from `Step.constants`; real values outside of a trace.
        needs_total_length: Whether it reads `Step.total_length`.
    """

    names: tuple[str, ...]
    needs_total_length: bool

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Computed anew each time, so that a trace does not leave its own kind of tensor behind."""
        ...

    def __call__(self, step: Step) -> tuple[Tensor, ...]:
        """One tensor for each of `names`."""
        ...


class Rotary:
    """cos and sin [B, S, R] of every position's angles, R half the rotated dimensions, in the compute type."""

    def __init__(self, rope: RopeConfig, rotary_dim: int, dtype: torch.dtype, suffix: str = "") -> None:
        """Rotate `rotary_dim` dimensions of a head; `suffix` tells two of a model's embeddings apart."""
        self.rope = rope
        self.rotary_dim = rotary_dim
        self.dtype = dtype
        self.names: tuple[str, ...] = (f"cos{suffix}", f"sin{suffix}")
        self.needs_total_length = rope.depends_on_length
        self._suffix = suffix

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """Tables of frequencies; none where the graph computes them."""
        if self.rope.rope_type == "dynamic":
            return {}
        if self.rope.rope_type == "longrope":
            short, long = longrope_inverse_frequencies(self.rope, self.rotary_dim)
            return {f"short_frequencies{self._suffix}": short, f"long_frequencies{self._suffix}": long}
        return {f"frequencies{self._suffix}": inverse_frequencies(self.rope, self.rotary_dim)}

    def _frequencies(self, step: Step) -> Tensor:
        """[D/2], or [B, 1, D/2] where they depend on the total length of each row."""
        if not self.needs_total_length:
            return step.constants[f"frequencies{self._suffix}"]
        assert step.total_length is not None
        if self.rope.rope_type == "dynamic":
            rows = dynamic_inverse_frequencies(self.rope, self.rotary_dim, step.total_length)
            return rows.unsqueeze(1)
        assert self.rope.original_max_position_embeddings is not None
        # longrope: a row beyond the trained length turns all of its new tokens by the long table. Keys that are in the
        # cache stay as they were turned.
        is_long = step.total_length > self.rope.original_max_position_embeddings
        return torch.where(
            is_long.unsqueeze(-1).unsqueeze(-1),
            step.constants[f"long_frequencies{self._suffix}"],
            step.constants[f"short_frequencies{self._suffix}"],
        )

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """cos and sin; the angles are float32, since half-precision ones are off by whole turns at long range."""
        angles = step.positions.unsqueeze(-1).to(torch.float32) * self._frequencies(step)
        cos, sin = angles.cos(), angles.sin()
        if self.rope.attention_factor != 1.0:
            cos, sin = cos * self.rope.attention_factor, sin * self.rope.attention_factor
        return cos.to(self.dtype), sin.to(self.dtype)


class CausalMask:
    """Which slots a token sees: [B, 1, S, T] bool, slot j at position p where j <= p and, windowed, j > p - window."""

    needs_total_length = False

    def __init__(self, window: int | None = None, suffix: str = "") -> None:
        """See everything before, or only the last `window` tokens, the current one included."""
        self.window = window
        self.names: tuple[str, ...] = (f"mask{suffix}",)

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def __call__(self, step: Step) -> tuple[Tensor]:
        """The mask."""
        positions = step.positions.unsqueeze(1).unsqueeze(-1)
        visible = step.slots <= positions
        if self.window is not None:
            visible = visible & (step.slots > positions - self.window)
        return (visible,)


def suffix(layer_type: str) -> str:
    """What tells the masks and angles of a layer type from those of full attention."""
    return "" if layer_type == "full_attention" else f"_{layer_type}"


def masks(layer_types: Collection[str], sliding_window: int | None) -> list[CausalMask]:
    """The mask of each layer type that a model has, with `suffix` in its name.

    Args:
        layer_types: Of each layer: full_attention, sliding_attention.
        sliding_window: Of the latter.
    """
    windows = {"full_attention": None, "sliding_attention": sliding_window}
    return [CausalMask(windows[layer_type], suffix(layer_type)) for layer_type in sorted(set(layer_types))]
