"""Recognising the masks of causal attention over a cache by what they are computed from.

A canonical graph gives query s of row b the position p = past_length[b] + s, and lets it see the slots j <= p, in a
windowed layer those with j > p - window, too. Whatever is computed in another way is no such mask. Over a cache in
delta form keys are the slots and, behind them, the new tokens: the mask is the same one, of other positions.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from kvgraph.export.contract import INPUT_IDS, PAST_LENGTH
from kvgraph.export.passes.matching import constant_number, constant_values, int_attribute, made_by

# Positions are below it.
_NEVER = 1 << 30


def match_window(mask: ir.Value | None, cache: ir.Value) -> int | None:
    """The window of a causal mask [B, 1, S, T]; 0 without one, None where it is another mask.

    Args:
        mask: Fourth input of Attention.
        cache: A buffer of T slots, an input of the graph.
    """
    if mask is None:
        return None
    if (both := made_by(mask, "And")) is None:
        return 0 if _is_causal(mask, cache) else None
    first, second = both.inputs
    for causal, recent in ((first, second), (second, first)):
        window = _window(recent, cache)
        if window is not None and _is_causal(causal, cache):
            return window
    return None


def _is_causal(value: ir.Value | None, cache: ir.Value) -> bool:
    """slot <= position."""
    node = made_by(value, "LessOrEqual")
    return node is not None and _is_keys(node.inputs[0], cache) and _is_query_positions(node.inputs[1])


def _window(value: ir.Value | None, cache: ir.Value) -> int | None:
    """w of slot > position - w."""
    node = made_by(value, "Greater")
    if node is None or not _is_keys(node.inputs[0], cache):
        return None
    oldest = made_by(node.inputs[1], "Sub")
    if oldest is None or not _is_query_positions(oldest.inputs[0]):
        return None
    window = constant_number(oldest.inputs[1])
    return int(window) if window is not None and window >= 1 else None


def _is_keys(value: ir.Value | None, cache: ir.Value) -> bool:
    """The positions of keys: the numbers of the slots, or those and behind them the new tokens' positions."""
    placed = made_by(value, "Unsqueeze")
    both = None if placed is None else made_by(placed.inputs[0], "Concat")
    if placed is None or both is None:
        return is_slots(value, cache)
    axes = constant_values(placed.inputs[1])
    if (
        axes is None
        or axes.tolist() != [1, 2]
        or len(both.inputs) != 2
        or int_attribute(both, "axis", 0) != 1
    ):
        return False
    return _is_filled(both.inputs[0], cache) and _is_new_positions(both.inputs[1])


def _is_filled(value: ir.Value | None, cache: ir.Value) -> bool:
    """[B, T]: the number of a slot below `past_length`, and of any other one a position that no query reaches."""
    node = made_by(value, "Where")
    filled = None if node is None else made_by(node.inputs[0], "Less")
    if node is None or filled is None or node.inputs[1] is not filled.inputs[0]:
        return False
    never = constant_number(node.inputs[2])
    return (
        is_slots(filled.inputs[0], cache)
        and _is_past(filled.inputs[1])
        and never is not None
        and never >= _NEVER
    )


def is_slots(value: ir.Value | None, cache: ir.Value) -> bool:
    """[T]: 0, 1, 2 ... up to the capacity, computed or written in."""
    capacity = None if cache.shape is None else cache.shape[2]
    constants = constant_values(value)
    if constants is not None:
        return isinstance(capacity, int) and np.array_equal(constants, np.arange(capacity))
    counted = _counted(value)
    if counted is None:
        return False
    axis = made_by(counted, "Shape")
    if axis is None:
        return isinstance(capacity, int) and constant_number(counted) == capacity
    source = axis.inputs[0]
    # Any buffer of the cache: all of them have one capacity.
    same = source is not None and source.is_graph_input() and _slots_of(source) == capacity
    return same and (int_attribute(axis, "start", 0), int_attribute(axis, "end", 4)) == (2, 3)


def _slots_of(value: ir.Value) -> object:
    return value.shape[2] if value.shape is not None and len(value.shape) == 4 else None


def _is_query_positions(value: ir.Value | None) -> bool:
    """[B, 1, S, 1]: past_length + 0, 1, 2 ... S - 1."""
    last = made_by(value, "Unsqueeze")
    heads = made_by(last.inputs[0], "Unsqueeze") if last is not None else None
    if last is None or heads is None:
        return False
    if constant_number(last.inputs[1]) not in (-1, 3) or constant_number(heads.inputs[1]) != 1:
        return False
    return _is_new_positions(heads.inputs[0])


def _is_new_positions(value: ir.Value | None) -> bool:
    """[B, S]: past_length + 0, 1, 2 ... S - 1."""
    total = made_by(value, "Add")
    if total is None:
        return False
    first, second = total.inputs
    return (_is_past(first) and _is_steps(second)) or (_is_past(second) and _is_steps(first))


def _is_past(value: ir.Value | None) -> bool:
    """[B, 1]: past_length."""
    node = made_by(value, "Unsqueeze")
    past = None if node is None else node.inputs[0]
    if node is None or past is None or constant_number(node.inputs[1]) not in (-1, 1):
        return False
    return past.is_graph_input() and past.name == PAST_LENGTH


def _is_steps(value: ir.Value | None) -> bool:
    """[S]: 0, 1, 2 ... S - 1; the constant [0] in a graph that takes one token."""
    constants = constant_values(value)
    if constants is not None:
        return np.array_equal(constants, [0])
    axis = made_by(_counted(value), "Shape")
    ids = None if axis is None else axis.inputs[0]
    if axis is None or ids is None or not ids.is_graph_input() or ids.name != INPUT_IDS:
        return False
    return (int_attribute(axis, "start", 0), int_attribute(axis, "end", 2)) == (1, 2)


def _counted(value: ir.Value | None) -> ir.Value | None:
    """n of 0, 1, 2 ... n - 1, without the `Squeeze` that made it a scalar."""
    node = made_by(value, "Range")
    if node is None or constant_number(node.inputs[0]) != 0 or constant_number(node.inputs[2]) != 1:
        return None
    scalar = made_by(node.inputs[1], "Squeeze")
    return node.inputs[1] if scalar is None else scalar.inputs[0]
