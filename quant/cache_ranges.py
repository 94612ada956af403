"""Offsets and scales of an 8-bit cache, from the keys and values that calibration saw.

Scales hold the largest value: the keys of the first tokens stand out, many queries look at them, and clipping them
changes what a model says. Calibration need not have seen the positions that the cache will: a channel that the rotary
embedding turns may reach the length of its pair.

Keys may lose the mean of every channel: what all keys have in common adds the same to all scores of a query, which
softmax does not see. FP8, whose steps grow with the value, then rounds what is left finer (half the KL divergence in a
small trained model); INT8 does where the range gets narrower. Keys that are kept without their rotary embedding have
one mean at all positions, and get it back before they are rotated (an eighth of the divergence).

Ranges leave room for what calibration did not see. That of FP8 costs nothing, for its steps are relative; values get
half as much again; keys without their rotary embedding, of which little is left when their mean is gone, the double.
"""

from __future__ import annotations

import numpy as np

from kvgraph.quant.formats import FORMATS
from kvgraph.quant.plan import CacheRange
from kvgraph.quant.scheme import CacheScheme
from kvgraph.quant.statistics import CacheStatistics

FLOAT_HEADROOM, UNROTATED_HEADROOM, VALUE_HEADROOM = 2.0, 2.0, 1.5


def choose_cache_range(
    statistics: CacheStatistics, scheme: CacheScheme, centred: bool, headroom: float = 1.0
) -> CacheRange:
    """Offset and scale of a layer's keys or values; what was never active gets a range of 1.

    Args:
        statistics: Of the keys or values.
        scheme: Format and granularity.
        centred: Whether they may lose their mean: keys may.
        headroom: Range of INT8 over what was seen.
    """
    form, mean = FORMATS[scheme.format], statistics.mean
    plain = statistics.length
    seen = np.maximum(statistics.high - mean, mean - statistics.low)
    shifted = np.where(statistics.turned, plain + np.abs(mean), seen)
    shift = centred & (shifted < plain if form.integer else np.ones_like(plain, np.bool_))
    largest = np.where(shift, shifted, plain)
    if scheme.granularity == "head":
        largest = largest.max(axis=1)
    elif scheme.granularity == "tensor":
        largest = largest.max()
    headroom = headroom if form.integer else FLOAT_HEADROOM
    scale = np.where(largest > 0, largest * headroom, 1.0) / form.maximum
    return CacheRange(scale.astype(np.float32), np.where(shift, mean, np.float32(0)))
