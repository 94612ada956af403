"""The cosines and sines of every slot's position, for keys that are kept without their rotary embedding.

A graph that keeps such keys computes angles twice: for the new tokens [B, S, R], and for all slots and the new tokens
behind them [B, T + S, R], by the same nodes. New tokens whose codes are in their slots already need no more than the
angles of the slots, [1, T, R].
"""

from __future__ import annotations

import onnx_ir as ir

from kvgraph.export.passes.constants import int64_constant
from kvgraph.export.passes.match_mask import is_slots
from kvgraph.export.passes.matching import int_attribute, made_by


def slot_angles(graph: ir.Graph, value: ir.Value, cache: ir.Value) -> ir.Value:
    """[1, T, R] in place of angles [B, T + S, R] for which `are_angles_of_slots` holds.

    The nodes are made once for all who ask for the same angles.
    """
    name = f"{value.name}/slots"
    made = next((node for node in graph if node.outputs[0].name == name), None)
    if made is not None:
        return made.outputs[0]
    node = value.producer()
    assert node is not None
    slots = _slots_of(value, cache)
    if slots is not None:
        new = ir.Node("", "Unsqueeze", [slots, int64_constant(graph, 0)], name=name, num_outputs=1)
    else:
        inputs = [
            source if _is_constant(source) else slot_angles(graph, source, cache)
            for source in node.inputs
            if source is not None
        ]
        new = ir.Node("", node.op_type, inputs, list(node.attributes.values()), name=name, num_outputs=1)
    new.outputs[0].name, new.outputs[0].type = name, value.type
    graph.insert_after(node, new)
    return new.outputs[0]


def are_angles_of_slots(value: ir.Value | None, new: ir.Value | None, cache: ir.Value) -> bool:
    """Whether a value is computed from the positions of slots and new tokens as `new` is from those of the latter.

    Args:
        value: [B, T + S, R].
        new: [B, S, R].
        cache: A buffer of T slots, an input of the graph.
    """
    while value is not None and new is not None:
        if _slots_of(value, cache) is not None:
            return _new_positions(value) is new
        node, other = value.producer(), new.producer()
        if node is None or other is None or node.op_type != other.op_type or node.domain or other.domain:
            return False
        if len(node.outputs) != 1 or len(node.inputs) != len(other.inputs):
            return False
        if dict(node.attributes) != dict(other.attributes):
            return False
        pairs = list(zip(node.inputs, other.inputs, strict=True))
        varying = [pair for pair in pairs if pair[0] is not pair[1]]
        if len(varying) != 1 or not all(_is_constant(one) for one, same in pairs if one is same):
            return False
        value, new = varying[0]
    return False


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer()


def _slots_of(value: ir.Value, cache: ir.Value) -> ir.Value | None:
    """0 ... T - 1 of [B, T + S] positions: those, for each row, and behind them the new tokens'."""
    both = made_by(value, "Concat")
    if both is None or len(both.inputs) != 2 or int_attribute(both, "axis", 0) != 1:
        return None
    rows = made_by(both.inputs[0], "Expand")
    slots = None if rows is None else rows.inputs[0]
    return slots if is_slots(slots, cache) else None


def _new_positions(value: ir.Value) -> ir.Value | None:
    both = value.producer()
    return None if both is None else both.inputs[1]
