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


def stored_experts(value: ir.Value | None) -> tuple[StoredMatrix, ...] | None:
    """The matrix of each expert of a value [X, in, out], if their weights have a packed form.

    Rules:
        * A constant of floats, also where it is read through a `Cast` to float32.
        * `DequantizeLinear` of INT8, INT4 or UINT4 constants along the inputs, whose blocks are a whole number of 32
          or all inputs; zero points for 4-bit codes alone. Experts begin with a byte.
    """
    node = made_by(value, "DequantizeLinear")
    codes = _experts(stored(value) if node is None else stored(node.inputs[0]))
    if codes is None:
        return None
    if node is None:
        return tuple(map(StoredMatrix, codes)) if codes[0].dtype in _FLOATS else None
    scales = _experts(stored(node.inputs[1]))
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    zeros = None if zero_point is None else _experts(stored(zero_point))
    block_size, eight = int_attribute(node, "block_size", 0), codes[0].dtype == ir.DataType.INT8
    if (
        codes[0].dtype not in _INTEGERS
        or scales is None
        or scales[0].dtype not in _FLOATS
        or (zero_point is not None and (zeros is None or eight))
        or int_attribute(node, "axis", 1) != 1
    ):
        return None
    (inputs, outputs), found = _shape(codes[0]), _shape(scales[0])
    blocks = found[0]
    if not block_size or found != (math.ceil(inputs / block_size), outputs):
        return None
    if block_size % BLOCK and blocks != 1:
        return None
    # One scale for each output of 8-bit codes is kept once.
    shared = None if eight and blocks == 1 else block_size
    return tuple(
        StoredMatrix(codes[expert], False, scales[expert], None if zeros is None else zeros[expert], shared)
        for expert in range(len(codes))
    )


def _experts(tensor: ir.TensorProtocol | None) -> list[ir.TensorProtocol] | None:
    """The matrices of a tensor of three dimensions."""
    if tensor is None or len(tensor.shape) != 3:
        return None
    count, *shape = _shape(tensor)
    if not isinstance(tensor, ir.ExternalTensor):
        array = tensor.numpy()
        return [ir.Tensor(array[expert], tensor.dtype, name=tensor.name) for expert in range(count)]
    bits = math.prod(shape) * tensor.dtype.bitwidth
    if bits % 8:
        return None
    size, start = bits // 8, tensor.offset or 0
    return [
        ir.ExternalTensor(
            tensor.location, start + expert * size, size, tensor.dtype, shape=ir.Shape(shape),
            name=f"{tensor.name}.{expert}", base_dir=tensor.base_dir,
        )
        for expert in range(count)
    ]  # fmt: skip


def _shape(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    return tuple(int(dim) for dim in tensor.shape.numpy())


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
