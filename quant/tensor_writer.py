"""Doing the jobs of `kvgraph.quant.tensor_jobs`: from one weights file to another, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.in_order import do_all, map_in_order
from kvgraph.export.weights_file import WeightsWriter
from kvgraph.quant.bundle_weights import NUMPY_TYPES, FloatWeights, as_float32
from kvgraph.quant.formats import Floats
from kvgraph.quant.linears import Linear
from kvgraph.quant.plan import Rescaling, WeightPart, WeightQuantizer, round_to_nearest
from kvgraph.quant.quantized_weight import choose_channel_scales, quantize_finite, round_channels
from kvgraph.quant.storage import PartPlace, StoredWeight, plan_parts, write_band, write_part
from kvgraph.quant.tensor_jobs import TensorJob

# Weights that an algorithm rounds at a time, 16 MB in float32; the search of a clip ratio holds about six times that.
PART_WEIGHTS = 1 << 22
# Weights that each core rounds to nearest at a time. Measured: 1 MB in float32 stays in a core's cache from one step to
# the next, and what is larger takes two to four times as long.
BAND_WEIGHTS = 1 << 18
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
        values = as_float32(weights.read_expert(linear.tensor, place.expert, start, stop))
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
    linear = stored.linear
    if (ready := job.plan.ready_weights) is not None:
        for place in plan_parts(stored, PART_WEIGHTS):
            write_part(writer, stored, ready.read(linear, place.expert, place.start, place.stop), place)
        return
    # Which tokens an expert sees is not known when a layer is calibrated.
    quantize = round_to_nearest if linear.kind == "experts" else job.plan.weight_quantizer
    if quantize is round_to_nearest and _has_bands(stored):
        _write_bands(writer, weights, job, stored)
    else:
        _write_parts(writer, weights, job, stored, quantize)


def _write_parts(
    writer: WeightsWriter,
    weights: FloatWeights,
    job: TensorJob,
    stored: StoredWeight,
    quantize: WeightQuantizer,
) -> None:
    """Some outputs at a time, all inputs of each; in order where the quantizer may depend on that."""
    linear, scale_dtype = stored.linear, NUMPY_TYPES[weights.tensors[job.source].dtype]
    nearest = quantize is round_to_nearest
    # Rows of a table lie together; of a matrix, a few columns would be read and written in small pieces.
    most = BAND_WEIGHTS if nearest and linear.kind == "table" else PART_WEIGHTS
    places = list(plan_parts(stored, most))

    def read(place: PartPlace) -> Floats:
        values = read_part(weights, linear, place, job.rescaling)
        _require_finite(values, weights, linear)
        return values

    largest = None
    if stored.global_scale is not None:
        largest = max(map_in_order(lambda place: _largest(read(place)), places))

    def write(place: PartPlace) -> None:
        part = WeightPart(linear.module, place.start, read(place), stored.scheme, scale_dtype, largest)
        write_part(writer, stored, quantize(part), place)

    if nearest:
        do_all(write, places)
    else:
        for place in places:
            write(place)


def _has_bands(stored: StoredWeight) -> bool:
    """Whether a weight can be rounded some inputs at a time: scales are of blocks, or follow from extremes."""
    scheme = stored.scheme
    return stored.linear.kind == "matmul" and (scheme.block_size is not None or scheme.clip == "absmax")


def _write_bands(writer: WeightsWriter, weights: FloatWeights, job: TensorJob, stored: StoredWeight) -> None:
    """Some inputs at a time, all outputs, to nearest: as a matrix lies in its file."""
    linear, scheme = stored.linear, stored.scheme
    scale_dtype = NUMPY_TYPES[weights.tensors[job.source].dtype]
    # Twice the block: bands of 4-bit codes and zero points then begin with a byte, whatever the outputs.
    unit = 2 * (scheme.block_size or 1)
    step = max(unit, BAND_WEIGHTS // linear.outputs // unit * unit)
    bands = [slice(start, min(start + step, linear.inputs)) for start in range(0, linear.inputs, step)]

    def read(band: slice) -> Floats:
        values = as_float32(weights.read(linear.tensor, band.start, band.stop))
        if job.rescaling is not None:
            values = rescale(values, job.rescaling, band, slice(None))
        _require_finite(values, weights, linear)
        return values

    if scheme.block_size is None:
        extremes = list(map_in_order(lambda band: _extremes(read(band)), bands))
        scales = choose_channel_scales(np.concatenate(extremes), scheme, scale_dtype)
        do_all(lambda band: write_band(writer, stored, round_channels(read(band), scales), band.start), bands)
        return
    largest = None
    if stored.global_scale is not None:
        largest = max(map_in_order(lambda band: _largest(read(band)), bands))
    do_all(
        lambda band: write_band(
            writer, stored, quantize_finite(read(band), scheme, scale_dtype, largest), band.start
        ),
        bands,
    )


def _require_finite(values: Floats, weights: FloatWeights, linear: Linear) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"{weights.path}: {linear.tensor!r} holds NaN or infinite values")


def _largest(values: Floats) -> float:
    return float(np.abs(values).max())


def _extremes(values: Floats) -> Floats:
    """Least and largest value of each output, [2, O]."""
    return np.stack([values.min(axis=0), values.max(axis=0)])


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
