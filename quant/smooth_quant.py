"""SmoothQuant: part of the inputs' range moves into the weights, channel by channel.

s_j = max|X_j| ** alpha / max|W_j| ** (1 - alpha); inputs are divided by s, the rows of the matrix multiplied. A channel
of the inputs that outgrows all others then no longer decides the scale of them all. Where the factors go is
`kvgraph.quant.rescaling`'s part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgraph.quant.formats import Floats
from kvgraph.quant.output_error import RoundedProducts
from kvgraph.quant.rescaling import Fold

_ALPHAS = np.linspace(0.0, 1.0, 21)
# Factors beyond these lose a weight in half precision.
_LEAST, _MOST = 1e-4, 1e4


def smoothing_factors(largest_input: Floats, largest_weight: Floats, alpha: float) -> Floats:
    """s [I] of channels with these largest magnitudes; 1 for channels that are never active, or never read."""
    used = (largest_input > 0) & (largest_weight > 0)
    inputs, weights = np.where(used, largest_input, 1.0), np.where(used, largest_weight, 1.0)
    factors: Floats = np.clip(inputs**alpha / weights ** (1 - alpha), _LEAST, _MOST).astype(np.float32)
    return factors


def fold_factors(fold: Fold, largest_input: Floats, weights: Sequence[Floats], alpha: float) -> Floats:
    """s of a fold's producer channels, from the inputs' largest magnitudes [I] and their readers' weights [I, O]."""
    largest_weight = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    return smoothing_factors(fold.reduce(largest_input), fold.reduce(largest_weight), alpha)


def search_factors(fold: Fold, products: RoundedProducts) -> Floats | None:
    """s for the alpha with the least output error; None where no alpha is better than leaving the weights alone."""
    best, best_error = None, products.error()
    for alpha in _ALPHAS:
        factors = fold_factors(fold, products.largest, products.weights, float(alpha))
        error = products.error(fold.spread(factors))
        if error < best_error:
            best, best_error = factors, error
    return best
