"""Rounding to nearest in C++, for integer formats: the codes and scales of `kvgraph.quant.quantized_weight`, sooner.

NumPy's are the definition. Where there is no compiled library, and for what it does not cover, each function here gives
None and NumPy does the work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgraph.quant.formats import FORMATS, Floats
from kvgraph.quant.quantized_weight import CLIP_RATIOS, QuantizedWeight
from kvgraph.quant.scheme import WeightScheme
from kvgraph.runtime.kernels import weights as compiled

# Where a block's values lie side by side, NumPy adds their squares in eight sums in turn; those of more values, or of
# what eights leave over, in yet another order.
_MOST_BESIDE, _BESIDE = 128, 8


def round_compiled(
    weight: NDArray[np.generic], scheme: WeightScheme, scale_dtype: np.dtype[np.generic]
) -> QuantizedWeight | None:
    """A matrix rounded to nearest; None where NumPy has to, or has to say that a value is not finite.

    Args:
        weight: [I, O] floats of any type, with rows that lie side by side, or columns that do.
        scheme: Format, granularity and clipping.
        scale_dtype: Type that the graph stores scales in.
    """
    if not _covered(weight, scheme) or scale_dtype.name not in compiled.FLOAT_TYPES:
        return None
    mse, block = scheme.clip == "mse", scheme.block_size or len(weight)
    ratios = np.array(CLIP_RATIOS if mse else CLIP_RATIOS[:1], np.float32)
    transposed = not _beside(weight)
    if not transposed:
        found = compiled.round_columns(weight, block, scheme.format, scale_dtype.name, ratios)
    elif len(weight) % block or (mse and (block > _MOST_BESIDE or block % _BESIDE)):
        return None
    else:
        found = compiled.round_rows(weight.T, block, scheme.format, scale_dtype.name, ratios)
    if found is None:
        return None
    codes, scale, zero = found
    if transposed:
        codes, scale, zero = codes.T, scale.T, zero.T
    if scheme.block_size is None:
        scale, zero = scale[0], zero[0]
    form = FORMATS[scheme.format]
    zero_point = zero.view(form.element) if form.asymmetric else None
    return QuantizedWeight(scheme, codes.view(form.element), scale, zero_point, None, scale_dtype)


def column_extremes(band: NDArray[np.generic]) -> Floats | None:
    """Least and largest value of each column of some rows [r, O], [2, O]; None as above."""
    if not compiled.compiled() or band.dtype.name not in compiled.FLOAT_TYPES:
        return None
    return compiled.column_extremes(band)


def channel_codes(band: NDArray[np.generic], scales: QuantizedWeight) -> NDArray[np.generic] | None:
    """Codes [r, O] of some rows, finite, of a matrix whose scales [O] are chosen; None as above."""
    form = FORMATS[scales.scheme.format]
    if not _covered(band, scales.scheme):
        return None
    zeros = None if scales.zero_point is None else scales.zero_point.astype(np.float32)
    return compiled.round_by_column(band, form.name, scales.scale, zeros).view(form.element)


def _covered(weight: NDArray[np.generic], scheme: WeightScheme) -> bool:
    known = weight.dtype.name in compiled.FLOAT_TYPES and scheme.format in compiled.INTEGER_FORMATS
    # A single column lies both ways; it is left to NumPy's judgement in which order to add.
    beside = weight.shape[1] > 1 and (_beside(weight) or weight.T.flags.c_contiguous)
    return compiled.compiled() and known and beside and weight.size > 0


def _beside(weight: NDArray[np.generic]) -> bool:
    """Whether the values of a row lie side by side."""
    return weight.strides[1] == weight.itemsize and weight.strides[0] >= weight.strides[1] * weight.shape[1]
