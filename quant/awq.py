"""AWQ: factors that spare the weights of strong inputs, then clips by the error that inputs make of a weight's error.

s_j = mean|X_j| ** alpha: rows of the matrix that meet strong inputs are rounded on a finer grid, for which the inputs
are divided by s beforehand. Alpha is the one with the least output error on a grid from 0, which leaves everything as
it is. Where the factors go is `kvgraph.quant.rescaling`'s part.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvgraph.quant.formats import Floats
from kvgraph.quant.output_error import RoundedProducts
from kvgraph.quant.plan import WeightPart
from kvgraph.quant.quantized_weight import QuantizedWeight, quantize_weight
from kvgraph.quant.rescaling import Fold

_ALPHAS = np.linspace(0.0, 1.0, 20, endpoint=False)
_LEAST_MEAN = 1e-4


def activation_factors(mean: Floats, alpha: float) -> Floats:
    """s [I] of channels with these mean magnitudes, centred about 1."""
    factors = np.maximum(mean, _LEAST_MEAN) ** alpha
    centred: Floats = (factors / np.sqrt(factors.max() * factors.min())).astype(np.float32)
    return centred


def search_factors(fold: Fold, mean: Floats, products: RoundedProducts) -> Floats | None:
    """s of a fold's producer channels with the least output error; None where nothing beats leaving the weights alone.

    Args:
        fold: Where the factors go.
        mean: [I], mean magnitude of every input channel.
        products: What is to be rounded.
    """
    best, best_error = None, products.error()
    for alpha in _ALPHAS[1:]:
        factors = activation_factors(fold.reduce(mean), float(alpha))
        error = products.error(fold.spread(factors))
        if error < best_error:
            best, best_error = factors, error
    return best


class AwqQuantizer:
    """A `kvgraph.quant.plan.WeightQuantizer` whose clips, where the scheme searches for them, spare the outputs.

    Args:
        inputs: Module -> some of its inputs [R, I], as rescaled; None for one that was not calibrated.
    """

    def __init__(self, inputs: Callable[[str], Floats | None]) -> None:
        self._inputs = inputs

    def __call__(self, part: WeightPart) -> QuantizedWeight:
        """The nearest codes under the chosen clips."""
        return quantize_weight(
            part.weight, part.scheme, part.scale_dtype, part.largest, self._inputs(part.module)
        )
