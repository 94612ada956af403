"""Masks over a past and new keys, in place of masks over the slots of one buffer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.contract import INPUT_IDS, PAST_LENGTH, Contract
from kvgraph.export.passes.bind_capacity import is_capacity
from kvgraph.export.passes.constants import constant, int64_constant

_SLOT_AXIS = 2
# Where a slot that holds nothing yet pretends to stand: after every query, so that no mask shows it.
_NEVER = 1 << 30


def place_keys(graph: ir.Graph, contract: Contract) -> None:
    """Give masks the position of every key where they had the numbers of the slots.

    The numbers 0 ... T - 1 become [B, 1, 1, T + S]: a past slot's number where it is below the row's `past_length`,
    else a position that no query reaches; then the positions of the new tokens. What follows is elementwise and
    broadcasts the new dimensions as it did the old.

    Raises:
        ValueError: The graph uses its capacity for something else.
    """
    for slots in _slot_numbers(graph, contract):
        readers = [(use.node, use.idx) for use in slots.uses()]
        source = slots.producer()
        assert source is not None
        tape = Tape()
        keys = _key_positions(graph, tape, slots)
        for node, index in readers:
            node.replace_input_with(index, keys)
        graph.insert_after(source, tape.nodes)
        forget_capacity(keys, contract)


def forget_capacity(value: ir.Value, contract: Contract) -> None:
    """Leave open the dimension of a value, and of what follows from it up to attention, that was T and is T + S."""
    _forget(value, contract)
    waiting, seen = [value], {value}
    while waiting:
        for node in waiting.pop().consumers():
            for output in node.outputs if node.op_type != "Attention" else ():
                if output not in seen and _forget(output, contract):
                    seen.add(output)
                    waiting.append(output)


def _forget(value: ir.Value, contract: Contract) -> bool:
    """Whether a value may have the dimension T, which its recorded shape then no longer says."""
    if value.shape is None:
        return True
    dims = [None if is_capacity(dim, contract.capacity) else dim for dim in value.shape]
    if dims == list(value.shape):
        return False
    # What was a row of slots has become keys for every row of the batch.
    value.shape = None if len(dims) == 1 else ir.Shape(dims)
    return True


def _slot_numbers(graph: ir.Graph, contract: Contract) -> list[ir.Value]:
    """Every `Range` up to the capacity, which a graph asks its first state tensor for."""
    state = {tensor.name for tensor in contract.state}
    capacities = [
        node.outputs[0]
        for value in graph.inputs
        if value.name in state
        for node in value.consumers()
        if node.op_type == "Shape"
    ]
    found = []
    while capacities:
        for use in capacities.pop().uses():
            if use.node.op_type in ("Squeeze", "Reshape", "Cast") and use.idx == 0:
                capacities.append(use.node.outputs[0])
            elif use.node.op_type == "Range" and use.idx == 1:
                found.append(use.node.outputs[0])
            else:
                raise ValueError(
                    f"{graph.name}: node {use.node.name!r} ({use.node.op_type}) uses the capacity of the cache, which "
                    "is expected to number slots alone; this graph's cache has no 8-bit form, leave kv_cache out"
                )
    return found


def _key_positions(graph: ir.Graph, tape: Tape, slots: ir.Value) -> ir.Value:
    """[B, 1, 1, T + S] int64."""
    inputs = {value.name: value for value in graph.inputs}
    zero, one, never = (
        constant(graph, f"int64.scalar.{number}", np.array(number, np.int64)) for number in (0, 1, _NEVER)
    )
    row_lengths = tape.op("Unsqueeze", [inputs[PAST_LENGTH], int64_constant(graph, 1)])
    filled = tape.op("Less", [slots, row_lengths])
    past = tape.op("Where", [filled, slots, never])
    length = tape.op("Shape", [inputs[INPUT_IDS]], {"start": 1, "end": 2})
    count = tape.op("Range", [zero, tape.op("Squeeze", [length]), one])
    new = tape.op("Add", [row_lengths, count])
    keys = tape.op("Concat", [past, new], {"axis": 1})
    placed = tape.op("Unsqueeze", [keys, int64_constant(graph, 1, 2)])
    for number, node in enumerate(tape.nodes):
        node.name = f"{slots.name}/keys.{number}"
        node.outputs[0].name = f"{slots.name}/keys.{number}"
        node.outputs[0].type = ir.TensorType(ir.DataType.INT64)
    filled.type = ir.TensorType(ir.DataType.BOOL)
    placed.name = f"{slots.name}/keys"
    return placed
