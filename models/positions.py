"""What all layers of a kind share at a step, computed from positions alone: rotary angles and masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvgraph.models.rope import RopeConfig, dynamic_inverse_frequencies, inverse_frequencies


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
        self._frequencies = f"frequencies{suffix}"

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """The frequencies, unless the graph computes them."""
        if self.needs_total_length:
            return {}
        return {self._frequencies: inverse_frequencies(self.rope, self.rotary_dim)}

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """cos and sin; the angles are float32, since half-precision ones are off by whole turns at long range."""
        if self.needs_total_length:
            assert step.total_length is not None
            frequencies = dynamic_inverse_frequencies(
                self.rope, self.rotary_dim, step.total_length
            ).unsqueeze(1)
        else:
            frequencies = step.constants[self._frequencies]
        angles = step.positions.unsqueeze(-1).to(torch.float32) * frequencies
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
