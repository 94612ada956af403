"""Quantized weights as a graph on the disk has them: from its nodes to the bytes of the weights file, and to floats.

Nothing here asks what was meant to be written: the oracle of `kvgraph.quant.proof`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.passes.constants import ir_dtype
from kvgraph.quant.bundle_weights import BundleWeights, as_float32, round_to
from kvgraph.quant.formats import Floats


@dataclass(frozen=True, slots=True)
class DequantizedWeight:
    """A weight that a graph reads through `DequantizeLinear`, by the names of its tensors.

    Attributes:
        codes: [R, C], or [X, R, C].
        scale: [R] or [C] by `axis`, or with blocks along `axis`.
        zero_point: Like the scale, or None.
        global_scale: What the scale is multiplied by, or None.
        axis: Which axis has its own scales (one a channel), or is cut into blocks.
        block_size: Entries of a block along `axis`; None: one scale a channel.
        compute: NumPy type of the result.
        readers: Operators that read it.
        input_order: Which of its inputs a matrix product gives to each row; None: as they come.
        rounds_inputs: Whether a matrix product that reads it has a quantized input.
    """

    codes: str
    scale: str
    zero_point: str | None
    global_scale: str | None
    axis: int
    block_size: int | None
    compute: np.dtype[np.generic]
    readers: tuple[str, ...]
    input_order: NDArray[np.int64] | None
    rounds_inputs: bool


def find_dequantized(model: ir.Model) -> dict[str, DequantizedWeight]:
    """Every quantized weight of a graph, by the name of its codes."""
    found = {}
    for node in model.graph:
        codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if codes is None or not _is_stored(codes) or len(codes.shape or ()) < 2:
            continue
        result = _cast(node.outputs[0])
        readers = [use.node for use in result.uses()]
        if all(reader.op_type == "DequantizeLinear" for reader in readers):
            continue  # NVFP4's scales
        scale, factor = _scale(node.inputs[1])
        zero_point = node.inputs[2] if len(node.inputs) > 2 else None
        block, axis = node.attributes.get("block_size"), node.attributes.get("axis")
        assert result.dtype is not None
        weight = DequantizedWeight(
            codes=_name(codes),
            scale=scale,
            zero_point=None if zero_point is None else _name(zero_point),
            global_scale=factor,
            axis=1 if axis is None else axis.as_int(),
            block_size=(block.as_int() or None) if block is not None else None,
            compute=result.dtype.numpy(),
            readers=tuple(reader.op_type for reader in readers),
            input_order=_input_order(readers),
            rounds_inputs=any(_has_quantized_input(product) for product in _products(readers)),
        )
        found[weight.codes] = weight
    return found


def input_scales(model: ir.Model) -> dict[str, float]:
    """Scale of every `QuantizeLinear` of a graph, by the name of what it rounds."""
    scales = {}
    for node in model.graph:
        if node.op_type == "QuantizeLinear":
            tensor = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
            scales[_name(node.inputs[0])] = float("nan") if tensor is None else float(tensor.numpy().max())
    return scales


def check_places(model: ir.Model, weights: BundleWeights) -> None:
    """Compare where a graph looks for its tensors with where the weights file says they are.

    Raises:
        RuntimeError: They differ in name, type, shape or bytes.
    """
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        stored = weights.tensors.get(name)
        found = (tensor.offset, tensor.length, tensor.dtype, tuple(value.shape or ()))
        if stored is None or found != (stored.offset, stored.size, ir_dtype(stored.dtype), stored.shape):
            raise RuntimeError(
                f"{model.graph.name}: tensor {name!r} is {found} in the graph, the weights file says {stored}"
            )


def read_rows(weights: BundleWeights, weight: DequantizedWeight, start: int, stop: int) -> Floats:
    """Entries `start` to `stop` along a weight's first axis, dequantized as the operator defines it, in float32.

    `start` is even, and where blocks lie along the first axis a multiple of two of them.
    """
    values = as_float32(weights.read(weight.codes, start, stop))
    if weight.zero_point is not None:
        _apply(np.subtract, values, weight, _row_scales(weights, weight, weight.zero_point, start, stop))
    scale = _row_scales(weights, weight, weight.scale, start, stop)
    if weight.global_scale is not None:
        factor = as_float32(weights.read(weight.global_scale))
        scale = round_to(scale * factor, weight.compute)
    _apply(np.multiply, values, weight, scale)
    return round_to(values, weight.compute)


def _row_scales(
    weights: BundleWeights, weight: DequantizedWeight, name: str, start: int, stop: int
) -> Floats:
    """Scales or zero points of rows `start` to `stop`: one for each block, or in a shape that broadcasts."""
    block = weight.block_size
    if weight.axis == 1:
        return as_float32(weights.read(name) if block is None else weights.read(name, start, stop))
    if block is None:
        return as_float32(weights.read(name, start, stop))[:, None]
    return as_float32(weights.read(name, start // block, -(-stop // block)))


def _apply(operation: np.ufunc, values: Floats, weight: DequantizedWeight, each: Floats) -> None:
    """Change rows in place by what every value, or every block along the axis, has."""
    block, axis = weight.block_size, weight.axis
    if block is not None:
        length = values.shape[axis]
        if length % block:
            each = np.repeat(each, block, axis=axis)
            each = each[:, :length] if axis == 1 else each[:length]
        else:
            # Seen block by block: to repeat the scales would make a second matrix.
            values = values.reshape(*values.shape[:axis], -1, block, *values.shape[axis + 1 :])
            each = np.expand_dims(each, axis + 1)
    operation(values, each, out=values)


def _scale(value: ir.Value | None) -> tuple[str, str | None]:
    """Names of a scale and, where it is dequantized itself, of its own scale."""
    producer = None if value is None else value.producer()
    if producer is None:
        return _name(value), None
    return _name(producer.inputs[0]), _name(producer.inputs[1])


def _cast(value: ir.Value) -> ir.Value:
    """What a value becomes by the `Cast` that alone reads it; itself where there is none."""
    uses = list(value.uses())
    return uses[0].node.outputs[0] if len(uses) == 1 and uses[0].node.op_type == "Cast" else value


def _products(readers: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """What reads a weight, and what reads an expert that is chosen from it."""
    for reader in readers:
        yield reader
        if reader.op_type == "Gather":
            yield from (use.node for use in reader.outputs[0].uses() if use.idx == 1)


def _input_order(readers: Iterable[ir.Node]) -> NDArray[np.int64] | None:
    """The constant order into which a `Gather` puts the inputs of the matrix products that read a weight.

    Raises:
        RuntimeError: They get different ones.
    """
    orders = []
    for reader in readers:
        producer = None if reader.inputs[0] is None else reader.inputs[0].producer()
        indices = None
        if reader.op_type == "MatMul" and producer is not None and producer.op_type == "Gather":
            axis = producer.attributes.get("axis")
            last = axis is not None and axis.as_int() == -1 and producer.inputs[1] is not None
            indices = (
                ir.convenience.get_const_tensor(producer.inputs[1]) if last and producer.inputs[1] else None
            )
        orders.append(None if indices is None else indices.numpy().astype(np.int64))
    if not orders or all(order is None for order in orders):
        return None
    first = orders[0]
    if first is None or any(order is None or not np.array_equal(order, first) for order in orders):
        raise RuntimeError("a weight is read by products that put their inputs into different orders")
    return first


def _has_quantized_input(node: ir.Node) -> bool:
    """Whether the input of a matrix product comes from a `DequantizeLinear`, scaled or cast on the way."""
    value = node.inputs[0] if node.op_type == "MatMul" else None
    producer = None if value is None else value.producer()
    while producer is not None and producer.op_type in ("Cast", "Mul", "Reshape"):
        value = producer.inputs[0]
        producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _is_stored(value: ir.Value) -> bool:
    return isinstance(value.const_value, ir.ExternalTensor)


def _name(value: ir.Value | None) -> str:
    assert value is not None
    assert value.name is not None
    return value.name
