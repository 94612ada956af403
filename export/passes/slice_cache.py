"""Attention over the part of the cache that is in use.

A buffer of T slots is bound whole, for it is written in place; without more, every step would also read it whole. The
graph gets an input `context_length` [1] int64, at least max(past_length) + S and at most T, and reads no slot past it.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from kvgraph.export.contract import CONTEXT_LENGTH, Contract, StateTensor
from kvgraph.export.passes.bind_capacity import is_capacity
from kvgraph.export.passes.constants import int64_constant

_SLOT_AXIS, _FLOAT8 = 2, "float8"


def slice_cache(model: ir.Model, contract: Contract) -> bool:
    """Cut the cache, and the mask with it, to `context_length` slots before attention.

    Rules:
        * What reads a buffer after its scatter reads `Slice(buffer, 0, context_length)`; the output stays whole.
        * What reads the buffer of a delta cache, which is not written, reads the same slice of it; of FP8 values the
          slice is taken behind `DequantizeLinear`, as TensorRT lets nothing else read them.
        * What asks a buffer for its capacity is given `context_length`: the slots, and so the masks, follow.
        * A mask that was made without asking (its capacity is a constant) is sliced along its last axis.
        * Attention to a source, whose keys are inputs as they are, has nothing to do with the cache.

    Raises:
        ValueError: A node reads the capacity together with other dimensions, or a mask over a delta cache is constant.
    """
    graph = model.graph
    values = {value.name: value for value in (*graph.inputs, *graph.outputs)}
    if CONTEXT_LENGTH in values:
        return False
    delta = {state.name for state in contract.state if state.form == "delta"}
    context = ir.Value(name=CONTEXT_LENGTH, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]))
    for state in contract.state:
        _answer_capacity(graph, values[state.name], context)
        if state.name not in delta:
            _answer_capacity(graph, values[state.output], context)
    following = _downstream(context)
    for value in following:
        _forget_capacity(value, contract)
    for state in contract.state:
        for buffer in _read_buffers(values, state):
            _slice_readers(graph, buffer, context)
    for node in list(graph):
        if node.op_type != "Attention" or len(node.inputs) <= 3 or _reads_source(node):
            continue
        if node.inputs[3] not in following:
            if delta:
                raise ValueError(
                    f"{graph.name}: the mask of node {node.name!r} does not ask for the capacity, as it has to where "
                    "new keys follow the past; export and quantize the bundle again"
                )
            _slice_mask(graph, node, context)
    if not context.uses():
        return False
    graph.inputs.append(context)
    return True


def _read_buffers(values: Mapping[str | None, ir.Value], state: StateTensor) -> list[ir.Value]:
    """The values that a graph reads of a state tensor: what was written, the past, or what FP8 codes stand for."""
    if state.form == "scatter":
        return [values[state.output]]
    past = values[state.name]
    if not state.dtype.startswith(_FLOAT8):
        return [past]
    return [use.node.outputs[0] for use in past.uses() if use.node.op_type == "DequantizeLinear"]


def _reads_source(attention: ir.Node) -> bool:
    """Whether the keys come from an encoder."""
    key = attention.inputs[1]
    return key is not None and key.is_graph_input()


def _answer_capacity(graph: ir.Graph, buffer: ir.Value, context: ir.Value) -> None:
    """Replace `Shape` of a buffer's slot axis by the context length."""
    for node in list(buffer.consumers()):
        if node.op_type != "Shape":
            continue
        start, end = _range(node)
        if not start <= _SLOT_AXIS < end:
            continue
        if (start, end) != (_SLOT_AXIS, _SLOT_AXIS + 1):
            raise ValueError(
                f"{graph.name}: node {node.name!r} takes dimensions {start} to {end - 1} of {buffer.name!r} together, "
                f"expected its capacity (dimension {_SLOT_AXIS}) alone; export the bundle again"
            )
        node.outputs[0].replace_all_uses_with(context)
        graph.remove(node, safe=True)


def _range(shape_node: ir.Node) -> tuple[int, int]:
    """The dimensions that a Shape node over four dimensions reports."""
    start, end = shape_node.attributes.get("start"), shape_node.attributes.get("end")
    first = 0 if start is None else start.as_int()
    last = 4 if end is None else min(end.as_int(), 4)
    return first + 4 * (first < 0), last + 4 * (last < 0)


def _downstream(context: ir.Value) -> set[ir.Value]:
    """Values that follow the context length, up to attention, whose result does not."""
    found, waiting = {context}, [context]
    while waiting:
        for node in waiting.pop().consumers():
            if node.op_type != "Attention":
                fresh = [value for value in node.outputs if value not in found]
                found.update(fresh)
                waiting.extend(fresh)
    return found


def _forget_capacity(value: ir.Value, contract: Contract) -> None:
    """Leave open the dimensions of a recorded shape that said T: they are now the context length."""
    if value.shape is not None:
        value.shape = ir.Shape([None if is_capacity(dim, contract.capacity) else dim for dim in value.shape])


def _slice_readers(graph: ir.Graph, buffer: ir.Value, context: ir.Value) -> None:
    """Give the readers of a buffer, a written one or an input, its first slots; the graph's output stays whole."""
    readers = [(use.node, use.idx) for use in buffer.uses()]
    scatter = buffer.producer()
    if not readers or (scatter is None and not buffer.is_graph_input()):
        return
    cut = _slice(graph, buffer, context, _SLOT_AXIS, f"{buffer.name}.in_use")
    if scatter is None:
        graph.insert_before(graph[0], cut)
    else:
        graph.insert_after(scatter, cut)
    for node, index in readers:
        node.replace_input_with(index, cut.outputs[0])


def _slice_mask(graph: ir.Graph, attention: ir.Node, context: ir.Value) -> None:
    """Cut a mask whose width is a constant."""
    mask = attention.inputs[3]
    assert mask is not None
    assert mask.shape is not None
    cut = _slice(graph, mask, context, len(mask.shape) - 1, f"{attention.name}.mask_in_use")
    graph.insert_before(attention, cut)
    attention.replace_input_with(3, cut.outputs[0])


def _slice(graph: ir.Graph, value: ir.Value, context: ir.Value, axis: int, name: str) -> ir.Node:
    """A new node: the first `context` entries of a value along an axis."""
    inputs = [value, int64_constant(graph, 0), context, int64_constant(graph, axis)]
    node = ir.Node("", "Slice", inputs, name=name, num_outputs=1)
    output = node.outputs[0]
    output.name, output.type = name, value.type
    if value.shape is not None:
        output.shape = ir.Shape([None if index == axis else dim for index, dim in enumerate(value.shape)])
    return node
