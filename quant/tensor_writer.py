"""Doing the jobs of `kvgraph.quant.tensor_jobs`: from one weights file to another, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.in_order import do_all, map_in_order
from kvgraph.export.weights_file import WeightsWriter
from kvgraph.quant.bundle_weights import NUMPY_TYPES, FloatWeights, as_float32
from kvgraph.quant.compiled_rounding import channel_codes, column_extremes, round_compiled
from kvgraph.quant.formats import Floats
from kvgraph.quant.linears import Linear
from kvgraph.quant.plan import Rescaling, WeightPart, WeightQuantizer, round_to_nearest
from kvgraph.quant.quantized_weight import (
    QuantizedWeight,
    choose_channel_scales,
    quantize_finite,
    round_channels,
)
from kvgraph.quant.storage import (
    PartPlace,
    StoredWeight,
    array_bytes,
    plan_parts,
    write_band,
    write_part,
)
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


def read_part(
    weights: FloatWeights, linear: Linear, place: PartPlace, rescaling: Rescaling | None
) -> NDArray[np.generic]:
    """The weights [I, stop - start] of a part in their own type; rescaled ones in float32."""
    start, stop = place.start, place.stop
    if linear.kind == "matmul":
        values = weights.read_columns(linear.tensor, start, stop)
    elif linear.kind == "table":
        values = weights.read(linear.tensor, start, stop).T
    else:
        values = weights.read_expert(linear.tensor, place.expert, start, stop)
    if rescaling is None:
        return values
    return rescale(as_float32(values), rescaling, slice(None), slice(start, stop))


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

    def read(place: PartPlace) -> NDArray[np.generic]:
        return read_part(weights, linear, place, job.rescaling)

    largest = None
    if stored.global_scale is not None:
        largest = max(map_in_order(lambda place: _largest(_finite(read(place), weights, linear)), places))

    def write(place: PartPlace) -> None:
        values = read(place)
        found = round_compiled(values, stored.scheme, scale_dtype) if nearest else None
        if found is None:
            exact = _finite(values, weights, linear)
            found = quantize(
                WeightPart(linear.module, place.start, exact, stored.scheme, scale_dtype, largest)
            )
        write_part(writer, stored, found, place)

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

    def read(band: slice) -> NDArray[np.generic]:
        values = weights.read(linear.tensor, band.start, band.stop)
        if job.rescaling is None:
            return values
        return rescale(as_float32(values), job.rescaling, band, slice(None))

    if scheme.block_size is None:
        extremes = list(map_in_order(lambda band: _extremes(read(band), weights, linear), bands))
        scales = choose_channel_scales(np.concatenate(extremes), scheme, scale_dtype)
        do_all(
            lambda band: write_band(writer, stored, _round_channels(read(band), scales), band.start), bands
        )
        return
    largest = None
    if stored.global_scale is not None:
        largest = max(map_in_order(lambda band: _largest(_finite(read(band), weights, linear)), bands))

    def write(band: slice) -> None:
        values = read(band)
        found = round_compiled(values, scheme, scale_dtype)
        if found is None:
            found = quantize_finite(_finite(values, weights, linear), scheme, scale_dtype, largest)
        write_band(writer, stored, found, band.start)

    do_all(write, bands)


def _finite(values: NDArray[np.generic], weights: FloatWeights, linear: Linear) -> Floats:
    """The values as float32.

    Raises:
        ValueError: One is not finite.
    """
    floats = as_float32(values)
    if not np.isfinite(floats).all():
        raise ValueError(f"{weights.path}: {linear.tensor!r} holds NaN or infinite values")
    return floats


def _largest(values: Floats) -> float:
    return float(np.abs(values).max())


def _extremes(values: NDArray[np.generic], weights: FloatWeights, linear: Linear) -> Floats:
    """Least and largest value of each output, [2, O]."""
    if (found := column_extremes(values)) is not None:
        return found
    floats = _finite(values, weights, linear)
    return np.stack([floats.min(axis=0), floats.max(axis=0)])


def _round_channels(values: NDArray[np.generic], scales: QuantizedWeight) -> QuantizedWeight:
    codes = channel_codes(values, scales)
    return round_channels(as_float32(values), scales) if codes is None else replace(scales, codes=codes)


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
        writer.write(job.name, array_bytes(stored), offset)
        offset += stored.nbytes


def _copy(writer: WeightsWriter, weights: FloatWeights, job: TensorJob) -> None:
    offset = 0
    for _, values in _pieces(weights, job.source):
        writer.write(job.name, array_bytes(values), offset)
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
