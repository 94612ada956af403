"""Rotary embeddings of keys: where a graph has them, and how to apply them to keys that were kept without.

The angles of a token follow from its position alone, by the nodes between the positions [B, S] and the embedding's
cosines and sines. For a whole cache those nodes are repeated for the positions of all its slots.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.contract import Contract
from kvgraph.export.passes.constants import constant

_ROTARY = "RotaryEmbedding"
_SLOT_AXIS = 2


def find_key_rotation(present: ir.Value) -> ir.Node | None:
    """The embedding whose result is cached; None where there is none, or where its angles depend on other lengths.

    Args:
        present: The graph's output for a layer's keys, in scatter form.
    """
    scatter = present.producer()
    update = None if scatter is None or len(scatter.inputs) < 2 else scatter.inputs[1]
    node = None if update is None else update.producer()
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != _ROTARY:
        return None
    return node if all(_follows_from_positions(angle) for angle in node.inputs[1:3]) else None


def unrotated_keys(rotation: ir.Node) -> ir.Value:
    """What an embedding turns, [B, K, S, D]."""
    keys = rotation.inputs[0]
    assert keys is not None
    return keys


class CacheRotation:
    """The rotary embedding of whole caches, in one graph.

    Args:
        graph: It gets the nodes that compute angles once for all layers that share them.
        contract: Of the graph, which names the cache.
    """

    def __init__(self, graph: ir.Graph, contract: Contract) -> None:
        self._graph = graph
        self._contract = contract
        self._made: dict[ir.Value, ir.Value] = {}

    def rotate(self, tape: Tape, rotation: ir.Node, keys: ir.Value, name: str) -> ir.Value:
        """Keys [B, K, T + S, D], the new ones last, turned as `rotation` turns the new ones.

        Args:
            tape: Its nodes will stand behind `rotation`.
            rotation: From `find_key_rotation`.
            keys: Without their embedding.
            name: Of the result.
        """
        angles = [self._of_cache(angle) for angle in rotation.inputs[1:3] if angle is not None]
        turned = tape.op(_ROTARY, [keys, *angles], dict(rotation.attributes), name=f"{name}/{_ROTARY}")
        turned.name, turned.type, turned.shape = name, keys.type, keys.shape
        return turned

    def _of_cache(self, value: ir.Value) -> ir.Value:
        """[B, T + S, R] in place of a cosine or sine [B, S, R], or of a value on the way to it."""
        if value not in self._made:
            index = _varying_input(value)
            if index is None:
                self._made[value] = self._positions(value)
            else:
                node, tape = value.producer(), Tape()
                assert node is not None
                source = node.inputs[index]
                assert source is not None
                inputs = [*node.inputs[:index], self._of_cache(source), *node.inputs[index + 1 :]]
                made = tape.op(node.op_type, inputs, dict(node.attributes), name=f"{node.name}/of_cache")
                made.name, made.type = f"{value.name}/of_cache", value.type
                self._graph.insert_after(node, tape.nodes)
                self._made[value] = made
        return self._made[value]

    def _positions(self, new: ir.Value) -> ir.Value:
        """[B, T + S] int64: every slot's number, whether it holds something or not, then the new tokens' positions."""
        graph, tape, node = self._graph, Tape(), new.producer()
        assert node is not None
        key = next(value for value in graph.inputs if value.name == self._contract.state[0].name)
        zero, one = (constant(graph, f"int64.scalar.{n}", np.array(n, np.int64)) for n in (0, 1))
        capacity = tape.op("Shape", [key], {"start": _SLOT_AXIS, "end": _SLOT_AXIS + 1})
        slots = tape.op("Range", [zero, tape.op("Squeeze", [capacity]), one])
        rows = tape.op("Shape", [new], {"start": 0, "end": 1})
        past = tape.op("Expand", [slots, tape.op("Concat", [rows, capacity], {"axis": 0})])
        positions = tape.op("Concat", [past, new], {"axis": 1})
        for number, made in enumerate(tape.nodes):
            made.name = made.outputs[0].name = f"{new.name}/of_cache.{number}"
            made.outputs[0].type = ir.TensorType(ir.DataType.INT64)
        graph.insert_after(node, tape.nodes)
        return positions


def _follows_from_positions(angle: ir.Value | None) -> bool:
    """Whether an angle is a function of positions alone."""
    value = angle
    while value is not None and not _are_positions(value):
        index, node = _varying_input(value), value.producer()
        value = None if index is None or node is None else node.inputs[index]
    return value is not None


def _varying_input(value: ir.Value) -> int | None:
    """Which input of its node a value follows from; None for positions, and where constants are not all else."""
    node = value.producer()
    if node is None or _are_positions(value):
        return None
    varying = [
        index
        for index, source in enumerate(node.inputs)
        if source is not None and not source.is_initializer()
    ]
    return varying[0] if len(varying) == 1 else None


def _are_positions(value: ir.Value) -> bool:
    """Whether a value is [B, S] int64, `past_length` plus the numbers of the new tokens."""
    node = value.producer()
    integer = value.dtype == ir.DataType.INT64 and value.shape is not None and len(value.shape) == 2
    return integer and node is not None and node.op_type == "Add"
