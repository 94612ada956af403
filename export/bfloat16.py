"""bfloat16 as NumPy arrays: by way of integers, for the type's own conversions hold up every other thread."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

BFLOAT16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)


def widen(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """bfloat16 values as float32, of the same shape."""
    bits = values.view(np.uint16).astype(np.uint32)
    return np.left_shift(bits, 16, out=bits).view(np.float32)
