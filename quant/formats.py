"""The number formats that weights, activations and caches are rounded to.

| format | values | maximum | stored as |
|---|---|---|---|
| int8 | -127 ... 127 | 127 | one byte |
| int4 | -8 ... 7 | 7 | two a byte, low half first |
| uint4 | 0 ... 15 around a zero point | 15 | int4: codes and zero points 8 less, for TensorRT has no unsigned one |
| uint8 | 0 ... 255 around a zero point | 255 | int8: codes and zero points 128 less, likewise |
| float8_e4m3fn | 4 exponent and 3 mantissa bits, no infinity | 448 | one byte |
| float4_e2m1 | 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives | 6 | two a byte, low half first |

int8 leaves out -128: with symmetric scales and zero point 0, which TensorRT asks for, it would have no counterpart.
Rounding is to nearest, ties to even, as QuantizeLinear does it; what is out of range saturates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.kernels.weights import compiled, pack_halves

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A format.

    Attributes:
        name: ONNX-style dtype.
        minimum: Least value that is used.
        maximum: Largest value.
        integer: Whether values are evenly spaced.
        bits: Bits of an element.
        element: NumPy type that holds one element unpacked.
    """

    name: str
    minimum: float
    maximum: float
    integer: bool
    bits: int
    element: np.dtype[np.generic]

    @property
    def asymmetric(self) -> bool:
        """Whether values lie around a zero point."""
        return self.name.startswith("uint")

    def round(self, values: Floats) -> NDArray[np.generic]:
        """The nearest representable values, saturated, in the format's own type; `values` are divided by the scale."""
        clipped = np.clip(values, self.minimum, self.maximum)
        if self.integer:
            # By way of bytes: a cast from floats to a 4-bit type is ten times slower.
            octet = np.uint8 if self.asymmetric else np.int8
            return np.rint(clipped, out=clipped).astype(octet).astype(self.element)
        return clipped.astype(self.element)

    def nearest(self, values: Floats) -> Floats:
        """The same values as float32."""
        if self.integer:
            clipped = np.clip(values, self.minimum, self.maximum)
            return np.rint(clipped, out=clipped)
        return self.round(values).astype(np.float32)


def _format(name: str, minimum: float, maximum: float, bits: int, element: object) -> NumberFormat:
    return NumberFormat(name, minimum, maximum, "int" in name, bits, np.dtype(element))  # type: ignore[call-overload]  # ml_dtypes' scalar types are untyped


FORMATS = {
    entry.name: entry
    for entry in (
        _format("int8", -127, 127, 8, np.int8),
        _format("int4", -8, 7, 4, ml_dtypes.int4),
        _format("uint4", 0, 15, 4, ml_dtypes.uint4),
        _format("uint8", 0, 255, 8, np.uint8),
        _format("float8_e4m3fn", -448, 448, 8, ml_dtypes.float8_e4m3fn),
        _format("float4_e2m1", -6, 6, 4, ml_dtypes.float4_e2m1fn),
    )
}


def pack(values: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The bytes that a file stores: elements in row-major order, 4-bit ones two a byte, the first in the low half."""
    octets: NDArray[np.uint8] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if bits >= 8:
        return octets
    if compiled():
        return pack_halves(octets)
    nibbles = octets & np.uint8(0x0F)
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    pairs = nibbles.view("<u2")
    pairs |= pairs >> np.uint16(4)
    return pairs.astype(np.uint8)
