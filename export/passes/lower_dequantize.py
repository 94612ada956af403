"""Forms of `DequantizeLinear` that TensorRT does not parse, in forms that it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from kvgraph.export.passes.constants import constant, int64_constant


@dataclass(frozen=True, slots=True)
class _Weight:
    """A `DequantizeLinear` of a stored matrix."""

    node: ir.Node
    codes: ir.Value
    scale: ir.Value
    zero_point: ir.Value | None
    axis: int
    block_size: int | None


def lower_dequantize(model: ir.Model) -> bool:
    """Rewrite quantized weights for TensorRT.

    Rules:
        * A short last block is filled up: codes with zeros in memory, and the result cut to its size. TensorRT wants
          whole blocks.
        * A zero point is left out and, times the scale, subtracted from the result. TensorRT knows symmetric ones.

    In both forms the engine keeps the weights in their 4 or 8 bits.
    """
    changed = False
    for node in list(model.graph):
        weight = _stored_weight(node)
        if weight is None:
            continue
        short = _missing_entries(weight)
        if not short and weight.zero_point is None:
            continue
        tape = Tape()
        original = weight.node.outputs[0]
        readers = [(use.node, use.idx) for use in original.uses()]
        result = original
        if short:
            _fill_up(model.graph, weight, short)
        if weight.zero_point is not None:
            result = _subtract(model.graph, tape, weight, result)
        if short:
            result = _cut(model.graph, tape, weight, result, short)
        for reader, index in readers:
            reader.replace_input_with(index, result)
        model.graph.insert_after(node, tape.nodes)
        changed = True
    return changed


def _stored_weight(node: ir.Node) -> _Weight | None:
    if node.op_type != "DequantizeLinear" or len(node.inputs) < 2:
        return None
    codes, scale, *rest = node.inputs
    if codes is None or scale is None or not isinstance(codes.const_value, ir.ExternalTensor):
        return None
    axis, block = node.attributes.get("axis"), node.attributes.get("block_size")
    return _Weight(
        node,
        codes,
        scale,
        rest[0] if rest else None,
        1 if axis is None else axis.as_int(),
        (block.as_int() or None) if block is not None else None,
    )


def _missing_entries(weight: _Weight) -> int:
    """How many entries along its axis a weight's last block is short of."""
    if weight.block_size is None or weight.codes.shape is None:
        return 0
    return -weight.codes.shape.numpy()[weight.axis] % weight.block_size


def _fill_up(graph: ir.Graph, weight: _Weight, short: int) -> None:
    """Whole blocks: a copy of the codes in the graph itself, with zeros behind them."""
    codes = _values(weight.codes)
    padding = [(0, short if axis == weight.axis else 0) for axis in range(codes.ndim)]
    # As bytes: not every operation knows 4-bit types.
    filled = np.pad(codes.view(np.uint8), padding).view(codes.dtype)
    whole = _constant(graph, f"{weight.codes.name}/whole_blocks", filled, weight.codes)
    weight.node.replace_input_with(0, whole)
    result = weight.node.outputs[0]
    result.shape = whole.shape
    if not weight.codes.uses():
        del graph.initializers[weight.codes.name or ""]


def _subtract(graph: ir.Graph, tape: Tape, weight: _Weight, result: ir.Value) -> ir.Value:
    """The result less zero point times scale, of each block or channel."""
    assert weight.zero_point is not None
    assert result.shape is not None
    name = f"{weight.codes.name}"
    scale = _values(weight.scale)
    product = _values(weight.zero_point).astype(np.float32) * scale.astype(np.float32)
    offset = product.astype(scale.dtype)
    zero_point = weight.zero_point
    weight.node.resize_inputs(2)
    if not zero_point.uses():
        del graph.initializers[zero_point.name or ""]
    shape = list(result.shape.numpy())
    if weight.block_size is None:
        around = [-1 if axis == weight.axis else 1 for axis in range(len(shape))]
        value = _constant(graph, f"{name}/offset", offset.reshape(around), weight.scale)
        return _op(tape, "Sub", [result, value], f"{name}/signed", result)
    # [R, C] as blocks, so that what is subtracted has one entry for each.
    axis, size = weight.axis, weight.block_size
    split = [*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :]]
    value = _constant(graph, f"{name}/offset", np.expand_dims(offset, axis + 1), weight.scale)
    blocks = _op(tape, "Reshape", [result, int64_constant(graph, *split)], f"{name}/blocks", result)
    blocks.shape = ir.Shape(split)
    signed = _op(tape, "Sub", [blocks, value], f"{name}/signed_blocks", result)
    signed.shape = ir.Shape(split)
    return _op(tape, "Reshape", [signed, int64_constant(graph, *shape)], f"{name}/signed", result)


def _cut(graph: ir.Graph, tape: Tape, weight: _Weight, result: ir.Value, short: int) -> ir.Value:
    """The result without the entries that fill its last block."""
    assert result.shape is not None
    shape = list(result.shape.numpy())
    shape[weight.axis] -= short
    bounds = [
        int64_constant(graph, 0),
        int64_constant(graph, shape[weight.axis]),
        int64_constant(graph, weight.axis),
    ]
    cut = _op(tape, "Slice", [result, *bounds], f"{weight.codes.name}/cut", result)
    cut.shape = ir.Shape(shape)
    return cut


def _op(tape: Tape, op_type: str, inputs: Sequence[ir.Value], name: str, like: ir.Value) -> ir.Value:
    result = tape.op(op_type, list(inputs), name=f"{name}/{op_type}")
    result.name, result.type, result.shape = name, like.type, like.shape
    return result


def _constant(graph: ir.Graph, name: str, values: NDArray[np.generic], like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    return constant(graph, name, values, like.dtype)


def _values(value: ir.Value) -> NDArray[np.generic]:
    tensor = ir.convenience.get_const_tensor(value)
    assert tensor is not None
    return tensor.numpy()
