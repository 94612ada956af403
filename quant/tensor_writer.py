"""Doing the jobs of `kvgraph.quant.tensor_jobs`: from one weights file to another, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.weights_file import WeightsWriter
from kvgraph.quant.bundle_weights import NUMPY_TYPES, BundleWeights, as_float32
from kvgraph.quant.formats import Floats
from kvgraph.quant.linears import Linear
from kvgraph.quant.plan import Rescaling, WeightPart
from kvgraph.quant.storage import StoredWeight, part_sizes, write_part
from kvgraph.quant.tensor_jobs import TensorJob

# Weights rounded at a time, 16 MB in float32; the search of a clip ratio holds about six times that.
PART_WEIGHTS = 1 << 22
# Bytes of a tensor that stays as it is, read and written at a time.
_PIECE_BYTES = 32 << 20


def write_tensor(writer: WeightsWriter, weights: BundleWeights, job: TensorJob, compute: str) -> None:
    """Do one job.

    Args:
        writer: Of the new file.
        weights: Of the float bundle.
        job: What to do.
        compute: The bundle's dtype, in which scales are stored.

    Raises:
        ValueError: A weight is not finite, or overflows its type once it is rescaled.
    """
    if job.stored is not None:
        _write_quantized(writer, weights, job, job.stored, NUMPY_TYPES[compute])
    elif job.rescaling is not None:
        _write_rescaled(writer, weights, job, job.rescaling)
    else:
        _copy(writer, weights, job)


def read_outputs(
    weights: BundleWeights, linear: Linear, start: int, stop: int, rescaling: Rescaling | None
) -> Floats:
    """The weights [I, stop - start] of some outputs of a linear, rescaled, as a float32 array."""
    if linear.kind == "matmul":
        values = as_float32(weights.read_columns(linear.tensor, start, stop))
    else:
        values = as_float32(weights.read(linear.tensor, start, stop)).T
    return values if rescaling is None else rescale(values, rescaling, slice(None), slice(start, stop))


def rescale(values: Floats, rescaling: Rescaling, inputs: slice, outputs: slice) -> Floats:
    """Part of a matrix [I, O] times the factors of its inputs and outputs."""
    if rescaling.inputs is not None:
        values = values * rescaling.inputs[inputs, None]
    if rescaling.outputs is not None:
        values = values * rescaling.outputs[outputs]
    return values


def _write_quantized(
    writer: WeightsWriter,
    weights: BundleWeights,
    job: TensorJob,
    stored: StoredWeight,
    scale_dtype: np.dtype[np.generic],
) -> None:
    linear = stored.linear
    parts = list(part_sizes(stored, PART_WEIGHTS))
    largest = None
    if stored.global_scale is not None:
        peaks = (np.abs(read_outputs(weights, linear, *part, job.rescaling)).max() for part in parts)
        largest = float(max(peaks))
    for start, stop in parts:
        values = read_outputs(weights, linear, start, stop, job.rescaling)
        if not np.isfinite(values).all():
            raise ValueError(f"{weights.path}: {linear.tensor!r} holds NaN or infinite values")
        part = WeightPart(linear.module, start, values, stored.scheme, scale_dtype, largest)
        write_part(writer, stored, job.plan.weight_quantizer(part), start)


def _write_rescaled(
    writer: WeightsWriter, weights: BundleWeights, job: TensorJob, rescaling: Rescaling
) -> None:
    offset = 0
    for start, values in _pieces(weights, job.source):
        part = slice(start, start + len(values))
        result = rescale(as_float32(values), rescaling, part, slice(None) if values.ndim > 1 else part)
        with np.errstate(over="ignore"):
            stored = result.astype(values.dtype)
        if not np.isfinite(as_float32(stored)).all():
            raise ValueError(f"{job.source}: rescaled, it is out of the range of {values.dtype.name}")
        writer.write(job.name, _bytes(stored), offset)
        offset += stored.nbytes


def _copy(writer: WeightsWriter, weights: BundleWeights, job: TensorJob) -> None:
    offset = 0
    for _, values in _pieces(weights, job.source):
        writer.write(job.name, _bytes(values), offset)
        offset += values.nbytes


def _pieces(weights: BundleWeights, name: str) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """A tensor in pieces along its first axis: where each begins, and its values."""
    stored = weights.tensors[name]
    if not stored.shape:
        yield 0, weights.read(name).reshape(1)
        return
    rows = stored.shape[0]
    step = max(1, _PIECE_BYTES * rows // max(stored.size, 1))
    for start in range(0, rows, step):
        yield start, weights.read(name, start, min(start + step, rows))


def _bytes(array: NDArray[np.generic]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
