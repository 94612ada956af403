"""How a quantized weight lies in the weights file: its tensors, their names, types, shapes and bytes.

| tensor | dtype | shape (matmul) | shape (table) |
|---|---|---|---|
| `X.weight` | the format | [I, O] | [V, E] |
| `X.weight_scale` | compute type; NVFP4 float8_e4m3fn | [O], or [blocks, O] | [V], or [V, blocks] |
| `X.weight_zero_point` | int4 | like the scale | like the scale |
| `X.weight_global_scale` | float32, NVFP4 only | [] | [] |

Where the graphs do not share a weight, the names of each graph's tensors begin with "prefill." and "decode.".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import TensorSpec
from kvgraph.export.weight_kinds import element_bits
from kvgraph.export.weights_file import WeightsWriter
from kvgraph.quant.bundle_weights import NUMPY_TYPES
from kvgraph.quant.formats import pack
from kvgraph.quant.linears import Linear
from kvgraph.quant.quantized_weight import QuantizedWeight
from kvgraph.quant.scheme import WeightScheme

# What int4 codes and zero points are less than the uint4 ones that they stand for.
UINT4_OFFSET = 8


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


def plan_storage(linear: Linear, scheme: WeightScheme, prefix: str, compute: str) -> StoredWeight:
    """The tensors that a weight becomes.

    Args:
        linear: The weight.
        scheme: How it is rounded.
        prefix: Put before every name.
        compute: The bundle's dtype.
    """
    shape: tuple[int, ...] = (linear.outputs,)
    if scheme.block_size is not None:
        blocks = -(-linear.inputs // scheme.block_size)
        shape = (blocks, linear.outputs) if linear.kind == "matmul" else (linear.outputs, blocks)
    name = f"{prefix}{linear.tensor}"
    asymmetric, two_levels = scheme.format == "uint4", scheme.scale_form == "float8_e4m3fn"
    return StoredWeight(
        linear,
        scheme,
        TensorSpec(name, "int4" if asymmetric else scheme.format, linear.shape),
        TensorSpec(f"{name}_scale", "float8_e4m3fn" if two_levels else compute, shape),
        TensorSpec(f"{name}_zero_point", "int4", shape) if asymmetric else None,
        TensorSpec(f"{name}_global_scale", "float32", ()) if two_levels else None,
    )


def write_part(writer: WeightsWriter, stored: StoredWeight, part: QuantizedWeight, first_output: int) -> None:
    """Write the codes and scales of some outputs of a weight, see `part_sizes`."""
    codes, zero_point = part.codes, part.zero_point
    if zero_point is not None:
        codes, zero_point = _signed(codes), _signed(zero_point)
    _write_outputs(writer, stored, stored.codes, codes, first_output)
    scale = part.scale.astype(NUMPY_TYPES[stored.scale.dtype])
    _write_outputs(writer, stored, stored.scale, scale, first_output)
    if stored.zero_point is not None and zero_point is not None:
        _write_outputs(writer, stored, stored.zero_point, zero_point, first_output)
    if stored.global_scale is not None and part.global_scale is not None and first_output == 0:
        writer.write(stored.global_scale.name, _bytes(np.array(part.global_scale, np.float32)))


def part_sizes(stored: StoredWeight, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of outputs (start, stop) to round and write at a time, of about `most` weights each.

    4-bit codes lie two a byte: a part begins with a byte where its number of outputs is even and, in a [I, O] matrix,
    O is; else the matrix is one part.
    """
    outputs = stored.linear.outputs
    step = max(2, most // stored.linear.inputs // 2 * 2)
    if element_bits(stored.codes.dtype) < 8 and stored.linear.kind == "matmul" and outputs % 2:
        step = outputs
    for start in range(0, outputs, step):
        yield start, min(start + step, outputs)


def _write_outputs(
    writer: WeightsWriter, stored: StoredWeight, spec: TensorSpec, values: NDArray[Any], first: int
) -> None:
    """Write values [O'] or [..., O'], those of the outputs that begin with `first`."""
    bits = element_bits(spec.dtype)
    if stored.linear.kind == "table":
        # Rows of the table, one after another.
        rows = values.T
        writer.write(spec.name, pack(rows, bits).data, first * (rows.size // len(rows)) * bits // 8)
    elif values.ndim == 1 or values.shape[-1] == stored.linear.outputs:
        writer.write(spec.name, pack(values, bits).data, first * bits // 8)
    else:
        for index, line in enumerate(values):
            offset = (index * stored.linear.outputs + first) * bits // 8
            writer.write(spec.name, pack(line, bits).data, offset)


def _signed(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """Unsigned 4-bit numbers as the signed ones that are 8 less: the highest bit turned over."""
    return (values.view(np.uint8) ^ np.uint8(UINT4_OFFSET)).view(NUMPY_TYPES["int4"])


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
