"""Element types of caches as the runtimes name them, and how NumPy carries those that it does not have."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.session import Floats


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element type.

    Attributes:
        name: As the contract spells it.
        onnx: Value of `onnx.TensorProto.DataType`.
        ort: As ONNX Runtime spells it.
        carrier: NumPy type of the same width that holds the bits.
    """

    name: str
    onnx: int
    ort: str
    carrier: np.dtype[Any]


_TYPES = {
    entry.name: entry
    for entry in (
        ElementType("float32", 1, "tensor(float)", np.dtype(np.float32)),
        ElementType("int8", 3, "tensor(int8)", np.dtype(np.int8)),
        ElementType("int64", 7, "tensor(int64)", np.dtype(np.int64)),
        ElementType("float16", 10, "tensor(float16)", np.dtype(np.float16)),
        ElementType("bfloat16", 16, "tensor(bfloat16)", np.dtype(np.uint16)),
        ElementType("float8e4m3fn", 17, "tensor(float8e4m3fn)", np.dtype(np.uint8)),
    )
}


def element_type(name: str) -> ElementType:
    """The element type that the contract calls `name`.

    Raises:
        ValueError: The runtime does not know it.
    """
    if name not in _TYPES:
        raise ValueError(
            f"element type {name!r} is unknown; this version of kvgraph knows {', '.join(_TYPES)}"
        )
    return _TYPES[name]


def ort_element_type(name: str) -> ElementType:
    """The element type that ONNX Runtime calls `name`, as "tensor(float16)".

    Raises:
        ValueError: The runtime does not know it.
    """
    for entry in _TYPES.values():
        if entry.ort == name:
            return entry
    known = ", ".join(entry.ort for entry in _TYPES.values())
    raise ValueError(f"element type {name!r} is unknown; this version of kvgraph knows {known}")


def to_float32(carried: NDArray[Any], name: str) -> Floats:
    """The values of an array of carrier type as a new float32 array; integers keep their value."""
    if name == "bfloat16":
        widened: Floats = (carried.astype(np.uint32) << 16).view(np.float32)
    elif name == "float8e4m3fn":
        widened = _float8e4m3fn_values()[carried]
    else:
        widened = carried.astype(np.float32)
    return widened


@cache
def _float8e4m3fn_values() -> Floats:
    """The value of each of the 256 codes: 1 sign, 4 exponent (bias 7), 3 mantissa bits, no infinity."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7) / 8.0
    # Exponent 0 is subnormal: no implicit one, scaled as exponent 1.
    magnitude = np.where(exponent == 0, mantissa, 1 + mantissa) * np.exp2(np.maximum(exponent, 1) - 7.0)
    magnitude[(codes & 127) == 127] = np.nan
    values: Floats = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return values
