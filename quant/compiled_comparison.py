"""Reading rows of a quantized weight back and comparing them with their source, in C++.

What it measures is what `kvgraph.quant.reload` and `kvgraph.quant.proof` measure in NumPy, but for the order of sums.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.weight_kinds import element_bits
from kvgraph.quant.bundle_weights import BundleWeights, as_float32
from kvgraph.quant.formats import Floats
from kvgraph.quant.reload import DequantizedWeight
from kvgraph.runtime.kernels import weights as compiled


def compare_compiled(
    exact: NDArray[np.generic], weights: BundleWeights, weight: DequantizedWeight, start: int, stop: int
) -> tuple[float, float, float] | None:
    """Energy of exact values, energy of what a weight differs by from them, and the largest difference.

    Args:
        exact: Entries `start` to `stop` of the source along its first axis, floats of any type.
        weights: What the weight is read from.
        weight: How the graph reads it.
        start: First entry; where blocks lie along the first axis a multiple of two of them.
        stop: Last entry + 1.

    Returns:
        None where there is no compiled library, or it does not know the format.
    """
    codes, columns = weights.tensors[weight.codes], exact.shape[-1]
    types = {exact.dtype.name, weight.compute.name}
    if not compiled.compiled() or codes.dtype not in ("int4", "int8") or not types <= {*compiled.FLOAT_TYPES}:
        return None
    blocks = _shared_by(weight, exact.shape)
    if blocks is None or weight.global_scale is not None or (codes.dtype == "int4" and columns % 2):
        return None
    scales = _shared(weights, weight, weight.scale, start, stop)
    zeros = None if weight.zero_point is None else _shared(weights, weight, weight.zero_point, start, stop)
    octets = weights.read_octets(weight.codes, start, stop)
    rows = exact.reshape(-1, columns)
    return compiled.compare(
        rows, octets, element_bits(codes.dtype), weight.compute.name, scales, zeros, blocks
    )


def _shared_by(weight: DequantizedWeight, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Rows and columns of [R, C], or of [X, R, C] as one matrix, that share a scale; None where none say it."""
    block, columns = weight.block_size, shape[-1]
    if len(shape) == 3:
        return (block, 1) if weight.axis == 1 and block is not None and shape[1] % block == 0 else None
    if weight.axis == 0:
        return (1, columns) if block is None else (block, 1)
    return (math.prod(shape), 1) if block is None else (1, block)


def _shared(weights: BundleWeights, weight: DequantizedWeight, name: str, start: int, stop: int) -> Floats:
    """Scales or zero points of entries `start` to `stop`."""
    if weight.axis == 1 and weight.block_size is None:
        return as_float32(weights.read(name))
    step = 1 if weight.axis == 1 or weight.block_size is None else weight.block_size
    return as_float32(weights.read(name, start // step, -(-stop // step)))
