"""How a quantized weight lies in the weights file: its tensors, their names, types, shapes and bytes.

| tensor | dtype | shape of matmul | of table | of experts |
|---|---|---|---|---|
| `M.weight` | the format | [I, O] | [V, E] | [X, I, O] |
| `M.weight_scale` | the weight's, float32, float8_e4m3fn | [O], or [blocks, O] | [V], or [V, blocks] | [X, blocks, O] |
| `M.weight_zero_point` | int4 or int8 | like the scale | like the scale | like the scale |
| `M.weight_global_scale` | float32, NVFP4 only | [] | [] | [] |

Where the graphs do not share a weight, the names of each graph's tensors begin with "prefill." and "decode.".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import TensorSpec
from kvgraph.export.weight_kinds import element_bits
from kvgraph.export.weights_file import WeightsWriter
from kvgraph.quant.bundle_weights import NUMPY_TYPES
from kvgraph.quant.formats import FORMATS, pack
from kvgraph.quant.linears import Linear
from kvgraph.quant.quantized_weight import QuantizedWeight
from kvgraph.quant.scheme import WeightScheme


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """The tensors of a quantized weight.

    Attributes:
        linear: Which weight it is.
        scheme: How it is rounded.
        codes: Its values.
        scale: Its scales.
        zero_point: None for symmetric formats.
        global_scale: None but for NVFP4.
    """

    linear: Linear
    scheme: WeightScheme
    codes: TensorSpec
    scale: TensorSpec
    zero_point: TensorSpec | None
    global_scale: TensorSpec | None

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Those that there are."""
        every = (self.codes, self.scale, self.zero_point, self.global_scale)
        return tuple(spec for spec in every if spec is not None)


def plan_storage(linear: Linear, scheme: WeightScheme, prefix: str, dtype: str) -> StoredWeight:
    """The tensors that a weight becomes.

    Args:
        linear: The weight.
        scheme: How it is rounded.
        prefix: Put before every name.
        dtype: Of the float weight.
    """
    shape: tuple[int, ...] = (linear.outputs,)
    # A scale for each channel of each expert is a block of all its inputs: one axis could not tell the experts apart.
    if scheme.block_size is not None or linear.kind == "experts":
        blocks = -(-linear.inputs // (scheme.block_size or linear.inputs))
        shape = tuple(
            blocks if axis == linear.inputs_axis else size for axis, size in enumerate(linear.shape)
        )
    name = f"{prefix}{linear.tensor}"
    form, two_levels = FORMATS[scheme.format], scheme.scale_form == "float8_e4m3fn"
    codes = f"int{form.bits}" if form.asymmetric else scheme.format
    scale = scheme.scale_form if scheme.scale_form in ("float32", "float8_e4m3fn") else dtype
    return StoredWeight(
        linear,
        scheme,
        TensorSpec(name, codes, linear.shape),
        TensorSpec(f"{name}_scale", scale, shape),
        TensorSpec(f"{name}_zero_point", codes, shape) if form.asymmetric else None,
        TensorSpec(f"{name}_global_scale", "float32", ()) if two_levels else None,
    )


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Which part of a weight is rounded and written at a time.

    Attributes:
        expert: Which of the stacked matrices; 0 where there is one.
        start: First output.
        stop: Last output + 1.
    """

    expert: int
    start: int
    stop: int


def plan_parts(stored: StoredWeight, most: int) -> Iterator[PartPlace]:
    """All parts of a weight in order, of about `most` weights each.

    4-bit codes lie two a byte: a part begins with a byte where its number of outputs is even and, in a [I, O] matrix,
    O is; else the matrix is one part.
    """
    outputs = stored.linear.outputs
    step = max(2, most // stored.linear.inputs // 2 * 2)
    if element_bits(stored.codes.dtype) < 8 and stored.linear.kind != "table" and outputs % 2:
        step = outputs
    for expert in range(stored.linear.experts):
        for start in range(0, outputs, step):
            yield PartPlace(expert, start, min(start + step, outputs))


def splits_bytes(stored: StoredWeight) -> bool:
    """Whether an expert's codes or zero points would begin within a byte, which no part can."""
    tensors = (stored.codes, *([] if stored.zero_point is None else [stored.zero_point]))
    return stored.linear.kind == "experts" and any(
        math.prod(int(dim) for dim in spec.shape[1:]) * element_bits(spec.dtype) % 8 for spec in tensors
    )


def write_part(writer: WeightsWriter, stored: StoredWeight, part: QuantizedWeight, place: PartPlace) -> None:
    """Write the codes and scales of a part."""
    codes, zero_point = _as_stored(stored, part)
    _write_outputs(writer, stored, stored.codes, codes, place)
    scale = part.scale.astype(NUMPY_TYPES[stored.scale.dtype])
    _write_outputs(writer, stored, stored.scale, scale, place)
    if stored.zero_point is not None and zero_point is not None:
        _write_outputs(writer, stored, stored.zero_point, zero_point, place)
    _write_global_scale(writer, stored, part, (place.expert, place.start) == (0, 0))


def write_band(writer: WeightsWriter, stored: StoredWeight, band: QuantizedWeight, first: int) -> None:
    """Write the codes of some inputs of a matrix [I, O] and, where blocks share them, their scales.

    Args:
        writer: Of the file.
        stored: The whole weight, cut into blocks or with one scale for each output.
        band: Inputs `first` and on, all outputs; without blocks its scales are those of all inputs.
        first: A multiple of the block size and, of 4-bit codes, even.
    """
    block, outputs = stored.scheme.block_size, stored.linear.outputs
    codes, zero_point = _as_stored(stored, band)
    bits = element_bits(stored.codes.dtype)
    writer.write(stored.codes.name, pack(codes, bits).data, first * outputs * bits // 8)
    if first and block is None:
        return
    place = 0 if block is None else first // block * outputs
    scale = band.scale.astype(NUMPY_TYPES[stored.scale.dtype])
    writer.write(stored.scale.name, array_bytes(scale), place * scale.itemsize)
    if stored.zero_point is not None and zero_point is not None:
        writer.write(stored.zero_point.name, pack(zero_point, bits).data, place * bits // 8)
    _write_global_scale(writer, stored, band, first == 0)


def _as_stored(
    stored: StoredWeight, part: QuantizedWeight
) -> tuple[NDArray[np.generic], NDArray[np.generic] | None]:
    """Codes and zero points, unsigned ones as the signed ones that are in the file."""
    if part.zero_point is None:
        return part.codes, None
    bits = element_bits(stored.codes.dtype)
    return _signed(part.codes, bits), _signed(part.zero_point, bits)


def _write_global_scale(
    writer: WeightsWriter, stored: StoredWeight, part: QuantizedWeight, first: bool
) -> None:
    if stored.global_scale is not None and first:
        writer.write(stored.global_scale.name, array_bytes(np.array(part.global_scale, np.float32)))


def _write_outputs(
    writer: WeightsWriter, stored: StoredWeight, spec: TensorSpec, values: NDArray[Any], place: PartPlace
) -> None:
    """Write values [O'] or [..., O'] of the outputs that a part has."""
    bits, outputs = element_bits(spec.dtype), stored.linear.outputs
    lines = values.reshape(-1, values.shape[-1])
    if stored.linear.kind == "table":
        # Rows of the table, one after another.
        writer.write(spec.name, pack(lines.T, bits).data, place.start * len(lines) * bits // 8)
        return
    first = place.expert * len(lines) * outputs + place.start
    if place.stop - place.start == outputs:
        writer.write(spec.name, pack(lines, bits).data, first * bits // 8)
        return
    for index, line in enumerate(lines):
        writer.write(spec.name, pack(line, bits).data, (first + index * outputs) * bits // 8)


def _signed(values: NDArray[np.generic], bits: int) -> NDArray[np.generic]:
    """Unsigned numbers as the signed ones that are half their range less: the highest bit turned over."""
    return (values.view(np.uint8) ^ np.uint8(1 << (bits - 1))).view(NUMPY_TYPES[f"int{bits}"])


def array_bytes(array: NDArray[Any]) -> memoryview:
    """What a file stores of an array whose elements fill bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
