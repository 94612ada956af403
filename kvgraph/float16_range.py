"""Whether the residual stream stays in float16's range, as data and in words.

A float16 bundle that overflows may look right on ONNX Runtime's CPU provider, which computes float16 operators in
float32 and drops the casts between them, and still give infinities on hardware that keeps every value in float16. So
the stream is measured in float32, and what exceeds the range is reported whatever the logits of a comparison are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST = 65504.0


@dataclass(frozen=True, slots=True)
class ResidualPeak:
    """The largest value of the residual stream at one place.

    Attributes:
        hidden_state: The place: 0 is the embedding, i + 1 what leaves layer i.
        magnitude: Its absolute value; infinite or NaN where float32 does not hold it either.
        row: Row of tokens that it is in.
        position: Position in that row.
    """

    hidden_state: int
    magnitude: float
    row: int
    position: int


@dataclass(frozen=True, slots=True)
class Float16Overflow:
    """A residual stream that float16 does not hold.

    Attributes:
        first: The first place that is out of range.
        dtype: Type of weights and activations.
    """

    first: ResidualPeak
    dtype: str

    @property
    def place(self) -> str:
        """The first place in words."""
        index = self.first.hidden_state
        return "the embedding" if index == 0 else f"layer {index - 1}"

    def describe(self) -> str:
        """What is wrong and what cures it, in one line."""
        first = self.first
        return (
            f"the residual stream leaves float16's range (up to {LARGEST:g}) at {self.place}, where it reaches "
            f"{first.magnitude:.6g} at position {first.position} of row {first.row}; "
            f"kvgraph export --dtype {self.dtype} --residual-dtype float32 keeps it"
        )


def residual_peak(hidden_state: int, rows: Sequence[NDArray[np.float32]]) -> ResidualPeak:
    """The peak of one place.

    Args:
        hidden_state: The place.
        rows: For each row of tokens the stream [S, E] in float32.
    """
    peaks = []
    for row, stream in enumerate(rows):
        # A token with a NaN counts as the largest: NumPy's maximum passes it on, and argmax finds it.
        by_token = np.abs(stream).max(axis=-1)
        position = int(by_token.argmax())
        peaks.append(ResidualPeak(hidden_state, float(by_token[position]), row, position))
    return peaks[int(np.argmax([peak.magnitude for peak in peaks]))]


def find_overflow(peaks: Sequence[ResidualPeak], dtype: str) -> Float16Overflow | None:
    """The first place whose residual float16 does not hold, None where it holds all of them.

    Args:
        peaks: Of every place, in order.
        dtype: Type of weights and activations.
    """
    # Not `>`, which a NaN is never.
    out = [peak for peak in peaks if not peak.magnitude <= LARGEST]
    return Float16Overflow(out[0], dtype) if out else None
