"""Finding the matrix behind the weight of a product."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_ir as ir

from kvgraph.export.packed.panels import BLOCK
from kvgraph.export.packed.stored_matrix import StoredMatrix
from kvgraph.export.passes.matching import constant_values, int_attribute, made_by, stored

_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_INTEGERS = (ir.DataType.INT8, ir.DataType.INT4, ir.DataType.UINT4)


def stored_matrix(value: ir.Value | None, transposed: bool) -> StoredMatrix | None:
    """The matrix that a value is, if its weights have a packed form.

    Rules:
        * A constant of floats, also where it is read through a `Cast` to float32.
        * `DequantizeLinear` of INT8, INT4 or UINT4 constants with a scale for each output, or for each block of inputs
          of a whole number of 32; zero points for 4-bit codes alone.

    Args:
        value: Second input of a product, or a table.
        transposed: Whether its rows are the outputs.
    """
    node = made_by(value, "DequantizeLinear")
    tensor = stored(value) if node is None else stored(node.inputs[0])
    if tensor is None or len(tensor.shape) != 2:
        return None
    if node is None:
        return StoredMatrix(tensor, transposed) if tensor.dtype in _FLOATS else None
    if tensor.dtype not in _INTEGERS or node.inputs[1] is None or node.inputs[1].dtype != ir.DataType.FLOAT:
        return None
    matrix = _dequantized(node, tensor, transposed)
    if matrix is None or matrix.zero_point is None or tensor.dtype != ir.DataType.INT8:
        return matrix
    zeros = constant_values(node.inputs[2])
    return None if zeros is None or zeros.any() else replace(matrix, zero_point=None)


def _dequantized(node: ir.Node, codes: ir.TensorProtocol, transposed: bool) -> StoredMatrix | None:
    """The matrix of a `DequantizeLinear`, if its scales lie as the packed forms need them."""
    scale = stored(node.inputs[1])
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    offsets = None if zero_point is None else stored(zero_point)
    if scale is None or (zero_point is not None and offsets is None) or scale.dtype not in _FLOATS:
        return None
    inputs_axis = 1 if transposed else 0
    axis, block_size = int_attribute(node, "axis", 1), int_attribute(node, "block_size", 0)
    rows, columns = (int(dim) for dim in codes.shape.numpy())
    outputs, inputs = (rows, columns) if transposed else (columns, rows)
    found = tuple(int(dim) for dim in scale.shape.numpy())
    if not block_size:
        fits = axis % 2 == 1 - inputs_axis and found == (outputs,)
        return StoredMatrix(codes, transposed, scale, offsets, None) if fits else None
    blocks = math.ceil(inputs / block_size)
    fits = found == ((outputs, blocks) if transposed else (blocks, outputs)) and axis % 2 == inputs_axis
    # A block that holds all inputs may have any size.
    whole = block_size % BLOCK == 0 or blocks == 1
    return StoredMatrix(codes, transposed, scale, offsets, block_size) if fits and whole else None
