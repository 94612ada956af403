"""Doing the jobs of `kvgraph.quant.tensor_jobs`: from one weights file to another, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.weights_file import WeightsWriter
from kvgraph.quant.bundle_weights import NUMPY_TYPES, FloatWeights, as_float32
from kvgraph.quant.formats import Floats
from kvgraph.quant.linears import Linear
from kvgraph.quant.plan import Rescaling, WeightPart, round_to_nearest
from kvgraph.quant.storage import PartPlace, StoredWeight, plan_parts, write_part
from kvgraph.quant.tensor_jobs import TensorJob

# Weights rounded at a time, 16 MB in float32; the search of a clip ratio holds about six times that.
PART_WEIGHTS = 1 << 22
# Bytes of a tensor that stays as it is, read and written at a time.
_PIECE_BYTES = 32 << 20


def write_tensor(writer: WeightsWriter, weights: FloatWeights, job: TensorJob) -> None:
    """Do one job.

    Args:
        writer: Of the new file.
        weights: Of the float bundle.
        job: What to do.

    Raises:
        ValueError: A weight is not finite, or overflows its type once it is rescaled.
    """
    if job.stored is not None:
        _write_quantized(writer, weights, job, job.stored)
    elif job.rescaling is not None:
        _write_rescaled(writer, weights, job, job.rescaling)
    else:
        _copy(writer, weights, job)


def read_part(weights: FloatWeights, linear: Linear, place: PartPlace, rescaling: Rescaling | None) -> Floats:
    """The weights [I, stop - start] of a part, rescaled, as a float32 array."""
    start, stop = place.start, place.stop
    if linear.kind == "matmul":
        values = as_float32(weights.read_columns(linear.tensor, start, stop))
    elif linear.kind == "table":
        values = as_float32(weights.read(linear.tensor, start, stop)).T
    else:
        values = as_float32(weights.read(linear.tensor, place.expert, place.expert + 1)[0, :, start:stop])
    return values if rescaling is None else rescale(values, rescaling, slice(None), slice(start, stop))


def rescale(values: Floats, rescaling: Rescaling, inputs: slice, outputs: slice) -> Floats:
    """Part of a matrix [I, O], or of several [X, I, O], times the factors of its inputs and outputs."""
    if rescaling.inputs is not None:
        values = values * rescaling.inputs[inputs, None]
    if rescaling.outputs is not None:
        values = values * rescaling.outputs[outputs]
    return values


def _write_quantized(
    writer: WeightsWriter, weights: FloatWeights, job: TensorJob, stored: StoredWeight
) -> None:
    linear, scale_dtype = stored.linear, NUMPY_TYPES[weights.tensors[job.source].dtype]
    places = list(plan_parts(stored, PART_WEIGHTS))
    if (ready := job.plan.ready_weights) is not None:
        for place in places:
            write_part(writer, stored, ready.read(linear, place.expert, place.start, place.stop), place)
        return
    largest = None
    if stored.global_scale is not None:
        peaks = (np.abs(read_part(weights, linear, place, job.rescaling)).max() for place in places)
        largest = float(max(peaks))
    # Which tokens an expert sees is not known when a layer is calibrated.
    quantize = round_to_nearest if linear.kind == "experts" else job.plan.weight_quantizer
    for place in places:
        values = read_part(weights, linear, place, job.rescaling)
        if not np.isfinite(values).all():
            raise ValueError(f"{weights.path}: {linear.tensor!r} holds NaN or infinite values")
        part = WeightPart(linear.module, place.start, values, stored.scheme, scale_dtype, largest)
        write_part(writer, stored, quantize(part), place)


def _write_rescaled(
    writer: WeightsWriter, weights: FloatWeights, job: TensorJob, rescaling: Rescaling
) -> None:
    offset = 0
    for start, values in _pieces(weights, job.source):
        part, everything = slice(start, start + len(values)), slice(None)
        # The first axis is that of a matrix's inputs, of a vector's elements, and of experts.
        inputs, outputs = part if values.ndim == 2 else everything, part if values.ndim == 1 else everything
        result = rescale(as_float32(values), rescaling, inputs, outputs)
        with np.errstate(over="ignore"):
            stored = result.astype(values.dtype)
        if not np.isfinite(as_float32(stored)).all():
            raise ValueError(f"{job.source}: rescaled, it is out of the range of {values.dtype.name}")
        writer.write(job.name, _bytes(stored), offset)
        offset += stored.nbytes


def _copy(writer: WeightsWriter, weights: FloatWeights, job: TensorJob) -> None:
    offset = 0
    for _, values in _pieces(weights, job.source):
        writer.write(job.name, _bytes(values), offset)
        offset += values.nbytes


def _pieces(weights: FloatWeights, name: str) -> Iterator[tuple[int, NDArray[np.generic]]]:
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
