"""GPTQ: the codes of a matrix chosen one input at a time, each input's error made up for by those that follow.

With H = X^T X over the calibration inputs and U the upper factor of its inverse (H^-1 = U^T U), rounding input i by an
error e changes the inputs after it by -e / U_ii * U_i,:, which is what least squares asks for. Inputs come in the order
of their power (`act_order`): the strongest are rounded while there is most left to make up for them. Scales are
chosen before, from the weights as they are, so that blocks stay the blocks of the stored order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvgraph.quant.formats import FORMATS, Floats
from kvgraph.quant.quantized_weight import QuantizedWeight, combined_scale, quantize_weight
from kvgraph.quant.scheme import WeightScheme

# Below this size a triangular inverse is LAPACK's.
_LEAF = 64


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """How GPTQ runs.

    Attributes:
        act_order: Round the strongest inputs first.
        block_size: Inputs after which the remaining weights are brought up to date.
        damping: Share of the mean power that is added to every input's.
    """

    act_order: bool = True
    block_size: int = 128
    damping: float = 0.05


class InputGram:
    """X^T X of the inputs of some matrix products, and what GPTQ derives from it, once for all of them.

    Args:
        gram: [I, I] float32.
        options: See `GptqOptions`.
    """

    def __init__(self, gram: Floats, options: GptqOptions) -> None:
        self.gram = gram
        self.options = options

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """[I], the order in which inputs are rounded."""
        power = np.diagonal(self.gram)
        if not self.options.act_order:
            return np.arange(len(power))
        return np.argsort(-power, kind="stable")

    @cached_property
    def factor(self) -> Floats:
        """U [I, I] of the ordered, damped matrix."""
        power = np.diagonal(self.gram)
        # An input that is never active constrains nothing: alone on its diagonal it is rounded to nearest.
        damping = self.options.damping * float(power.mean()) or 1.0
        while True:
            try:
                return inverse_factor(self.gram, self.order, damping)
            except np.linalg.LinAlgError:
                # Rounding errors of a badly conditioned matrix; more of a diagonal always helps.
                damping *= 10

    def block_rows(self, size: int) -> Floats:
        """Inputs [size, I] that have this X^T X within every block of `size` channels."""
        rows = np.zeros((size, len(self.gram)), np.float32)
        for start in range(0, len(self.gram), size):
            block = self.gram[start : start + size, start : start + size]
            damping = self.options.damping * float(np.diagonal(block).mean()) or 1.0
            factor = np.linalg.cholesky(block + np.float32(damping) * np.eye(len(block), dtype=np.float32))
            rows[: len(block), start : start + size] = factor.T
        return rows

    def errors(self, difference: Floats) -> Floats:
        """Squared error of each output [O] that a change of the weights [I, O] makes."""
        result: Floats = (difference * (self.gram @ difference)).sum(axis=0)
        return result


def inverse_factor(gram: Floats, order: NDArray[np.intp], damping: float) -> Floats:
    """Upper triangular U with H^-1 = U^T U, H being gram[order, order] + damping * identity.

    The lower factor of the reversed H, reversed, is an upper factor R of H itself, H = R R^T, and U = R^-1: the inverse
    is never formed.

    Raises:
        numpy.linalg.LinAlgError: In float32, H is not positive definite.
    """
    backwards = order[::-1]
    damped = gram[np.ix_(backwards, backwards)]
    damped[np.diag_indices(len(damped))] += np.float32(damping)
    lower: Floats = np.linalg.cholesky(damped)
    del damped
    upper = np.ascontiguousarray(lower[::-1, ::-1])
    del lower
    _invert_upper(upper)
    return upper


def _invert_upper(matrix: Floats) -> None:
    """Invert an upper triangular matrix in place, by halves: [[A, B], [0, C]]^-1 = [[A', -A' B C'], [0, C']]."""
    size = len(matrix)
    if size <= _LEAF:
        matrix[:] = np.triu(np.linalg.inv(matrix))
        return
    half = size // 2
    _invert_upper(matrix[:half, :half])
    _invert_upper(matrix[half:, half:])
    matrix[:half, half:] = -(matrix[:half, :half] @ matrix[:half, half:]) @ matrix[half:, half:]


def gptq(
    weight: Floats,
    scheme: WeightScheme,
    scale_dtype: np.dtype[np.generic],
    inputs: InputGram,
    largest: float | None = None,
) -> tuple[QuantizedWeight, NDArray[np.bool_]]:
    """A matrix rounded for its inputs.

    Args:
        weight: [I, O] float32.
        scheme: How.
        scale_dtype: Type that the graph stores scales in.
        inputs: Of the products that read the matrix.
        largest: See `quantize_weight`.

    Returns:
        The rounded matrix, and which outputs [O] have GPTQ's codes: those where they have the smaller error on the
        inputs. The others have the nearest.
    """
    nearest = quantize_weight(weight, scheme, scale_dtype, largest)
    grid = nearest
    if scheme.clip == "mse" and scheme.block_size is not None:
        # Clips that spare the outputs, and not only the weights.
        rows = inputs.block_rows(scheme.block_size)
        grid = quantize_weight(weight, scheme, scale_dtype, largest, rows)
    codes = _sequential_codes(weight, inputs, grid)
    found = replace(grid, codes=FORMATS[scheme.format].round(codes))
    better = inputs.errors(found.dequantize() - weight) < inputs.errors(nearest.dequantize() - weight)
    zero_point = nearest.zero_point
    if zero_point is not None and found.zero_point is not None:
        zero_point = np.where(better, found.zero_point, zero_point)
    chosen = replace(
        nearest,
        codes=np.where(better, found.codes, nearest.codes),
        scale=np.where(better, found.scale, nearest.scale),
        zero_point=zero_point,
    )
    return chosen, better


def _sequential_codes(weight: Floats, inputs: InputGram, grid: QuantizedWeight) -> Floats:
    """GPTQ's codes [I, O], as float32, under the scales and zero points of a rounded matrix."""
    order, factor = inputs.order, inputs.factor
    scales = combined_scale(grid.scale, grid.global_scale, grid.scale_dtype)
    remaining = weight[order]
    codes = np.empty_like(weight)
    step = inputs.options.block_size
    for start in range(0, len(order), step):
        stop = min(start + step, len(order))
        block, errors = remaining[start:stop], np.empty((stop - start, weight.shape[1]), np.float32)
        for row, index in enumerate(order[start:stop]):
            at = start + row
            codes[index], rounded = _round_input(block[row], int(index), grid, scales)
            errors[row] = (block[row] - rounded) / factor[at, at]
            block[row + 1 :] -= np.outer(factor[at, at + 1 : stop], errors[row])
        remaining[stop:] -= factor[start:stop, stop:].T @ errors
    return codes


def _round_input(values: Floats, index: int, grid: QuantizedWeight, scales: Floats) -> tuple[Floats, Floats]:
    """Codes [O] and rounded values [O] of one input's weights, under the scales that the input has."""
    block = grid.scheme.block_size
    at = ... if block is None else index // block
    scale = scales[at]
    # Where a product of NVFP4's two scales has become 0, so has every value.
    divisor: Floats = np.where(scale > 0, scale, np.float32(np.inf))
    scaled = values / divisor
    form = FORMATS[grid.scheme.format]
    if grid.zero_point is None:
        codes = form.nearest(scaled)
        return codes, codes * scale
    zero = grid.zero_point[at].astype(np.float32)
    codes = form.nearest(np.rint(scaled) + zero)
    return codes, (codes - zero) * scale
