"""What rounding some matrix products does to their outputs.

Both searches for factors (SmoothQuant's alpha, AWQ's) ask it what a candidate is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgraph.quant.formats import FORMATS, Floats
from kvgraph.quant.quantized_weight import quantize_weight
from kvgraph.quant.scheme import ActivationScheme, ModuleScheme

# Outputs of each product that are looked at: factors belong to inputs, and these tell enough about them.
_OUTPUTS = 256
_LEAST_SHARE = 1e-12


@dataclass(frozen=True, slots=True)
class RoundedProducts:
    """Matrix products of one input that are to be rounded.

    Attributes:
        rows: [R, I], some inputs.
        largest: [I], largest magnitude of every input channel.
        weights: [I, O] each.
        schemes: How each is rounded; None leaves it float.
        scale_dtype: Type that weight scales are stored in.
    """

    rows: Floats
    largest: Floats
    weights: Sequence[Floats]
    schemes: Sequence[ModuleScheme | None]
    scale_dtype: np.dtype[np.generic]

    def error(self, factors: Floats | None = None) -> float:
        """Sum over the products of log(squared error of the outputs / their square): every product counts alike.

        Args:
            factors: [I], inputs are divided by them and the weights' rows multiplied, before they are rounded.
        """
        pairs = zip(self.weights, self.schemes, strict=True)
        return sum(self._log_share(weight, scheme, factors) for weight, scheme in pairs if scheme is not None)

    def _log_share(self, weight: Floats, scheme: ModuleScheme, factors: Floats | None) -> float:
        weight = weight[:, :: max(1, weight.shape[1] // _OUTPUTS)]
        exact = self.rows @ weight
        rows, largest = self.rows, self.largest
        if factors is not None:
            weight, rows, largest = weight * factors[:, None], rows / factors, largest / factors
        rounded = quantize_weight(weight, scheme.weight, self.scale_dtype, inputs=rows).dequantize()
        if scheme.activation is not None:
            rows = round_inputs(rows, float(largest.max()), scheme.activation)
        error = float(np.square(rows @ rounded - exact).sum(dtype=np.float64))
        power = float(np.square(exact).sum(dtype=np.float64))
        return float(np.log(max(error / power, _LEAST_SHARE))) if power > 0 else 0.0


def round_inputs(rows: Floats, largest: float, scheme: ActivationScheme) -> Floats:
    """Inputs [R, I] as a graph rounds them: by one scale, here of the whole range, or by one for each row."""
    form = FORMATS[scheme.format]
    if scheme.granularity == "tensor":
        scale = np.float32(largest / form.maximum) if largest > 0 else np.float32(1)
        return form.nearest(rows / scale) * scale
    peaks = np.abs(rows).max(axis=1, keepdims=True)
    scales: Floats = np.where(peaks > 0, peaks / np.float32(form.maximum), np.float32(1))
    return form.nearest(rows / scales) * scales
