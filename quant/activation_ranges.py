"""The one scale of a tensor, from what calibration saw of it.

| clip | largest magnitude that stays in range |
|---|---|
| absmax | the largest seen |
| percentile | the one that 99.99% of the values do not exceed |
| mse | the one whose rounding has the least squared error |
| entropy | the one whose rounded distribution diverges least (KL) from the one seen |

Values beyond the range saturate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgraph.quant.formats import FORMATS, Floats, NumberFormat
from kvgraph.quant.scheme import ActivationScheme

PERCENTILE = 99.99
# Shares of the largest magnitude that the searches try; rarely is less than a tenth best.
_SHARES = np.linspace(1.0, 0.1, 91)
_BINS = 2048
_SMOOTHED = 1e-6


def choose_scale(rows: Floats, largest: float, scheme: ActivationScheme) -> float:
    """The scale of a tensor's values; 1 where it was never anything but zero.

    Args:
        rows: Values of some tokens, any shape.
        largest: Largest magnitude over all tokens.
        scheme: Format and clip.
    """
    if largest == 0:
        return 1.0
    form = FORMATS[scheme.format]
    magnitudes = np.abs(rows).reshape(-1)
    # Where none of the tokens kept has a value, the exact range is all there is to go by.
    if scheme.clip == "absmax" or not magnitudes.any():
        limit = largest
    elif scheme.clip == "percentile":
        limit = float(np.percentile(magnitudes, PERCENTILE)) or largest
    elif scheme.clip == "mse":
        limit = least_error_limit(magnitudes, largest, form)
    else:
        limit = least_divergence_limit(magnitudes, largest, form)
    return limit / form.maximum


def least_error_limit(magnitudes: Floats, largest: float, form: NumberFormat) -> float:
    """Of the shares of `largest`, the limit whose rounding has the least squared error."""
    errors, relative = [], magnitudes / np.float32(largest)
    for share in _SHARES:
        scale = np.float32(share / form.maximum)
        rounded = form.nearest(relative / scale) * scale
        errors.append(float(np.square(rounded - relative).sum(dtype=np.float64)))
    return largest * float(_SHARES[int(np.argmin(errors))])


def least_divergence_limit(magnitudes: Floats, largest: float, form: NumberFormat) -> float:
    """Of the shares of `largest`, the limit whose rounded distribution has the least KL from that of the values.

    The values' histogram up to the limit, with what lies beyond put into its last bin, is compared with the same mass
    spread evenly over the bins that share a code. Zeros, which every limit represents exactly, are left out.
    """
    counts, edges = np.histogram(magnitudes[magnitudes > 0], bins=_BINS, range=(0.0, largest))
    centres = ((edges[:-1] + edges[1:]) / 2).astype(np.float32)
    divergences = []
    for share in _SHARES:
        used = max(1, round(_BINS * float(share)))
        scale = np.float32(edges[used] / form.maximum)
        codes = form.nearest(centres[:used] / scale)
        divergences.append(_divergence(counts, used, codes))
    return largest * float(_SHARES[int(np.argmin(divergences))])


def _divergence(counts: NDArray[np.int64], used: int, codes: Floats) -> float:
    """KL of the clipped histogram from its rounded form, whose bins [used] have `codes`."""
    inside = counts[:used].astype(np.float64)
    clipped = inside.copy()
    clipped[-1] += counts[used:].sum()
    # Only bins that hold something share a code's mass, so that an empty stretch stays empty.
    _, cells = np.unique(codes, return_inverse=True)
    filled = inside > 0
    mass = np.bincount(cells, inside)
    bins = np.bincount(cells, filled)
    spread = np.where(filled, mass[cells] / np.maximum(bins[cells], 1), 0.0)
    if spread.sum() == 0:
        return float("inf")
    p, q = clipped / clipped.sum(), spread / spread.sum()
    seen = p > 0
    return float((p[seen] * np.log(p[seen] / np.maximum(q[seen], _SMOOTHED))).sum())
