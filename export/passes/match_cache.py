"""Recognising how a layer keeps its keys and values: in a float buffer that it writes, or as 8-bit codes in delta form.

Codes are (entry - offset) / scale, rounded. A graph may take the scale and the offset apart in several places, as
`kvgraph.quant.kv_cache` describes; what it does to codes before attention, to queries and to what is attended has to
undo what it did to new entries, or the cache is not recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.contract import PAST_LENGTH
from kvgraph.export.passes.matching import constant_values, input_of, int_attribute, made_by, static_dim

Floats = NDArray[np.float32]
_SLOT_AXIS = 2


@dataclass(frozen=True, slots=True)
class Cache:
    """The keys or the values of a layer.

    Attributes:
        past: The graph's input, [B, K, T, D].
        present: The graph's output, the buffer or the codes of new entries.
        entries: New keys or values [B, K, S, D], before they are rounded.
        scale: [K, D]; None of a float cache.
        offset: [K, D]; None of a float cache.
        outside: [K, D], the part of the scale that attention's other operands or its result carry; None for none.
        restored: Whether the offset is added again.
        turn: The rotary embedding of the whole cache, None where keys are kept as attention reads them.
    """

    past: ir.Value
    present: ir.Value
    entries: ir.Value
    scale: Floats | None = None
    offset: Floats | None = None
    outside: Floats | None = None
    restored: bool = True
    turn: ir.Node | None = None


def match_cache(value: ir.Value | None, attention: ir.Node) -> Cache | None:
    """Where keys or values that an attention reads are kept, if nothing else reads them."""
    return _scattered(value, attention) or _coded(value)


def _scattered(present: ir.Value | None, attention: ir.Node) -> Cache | None:
    """A buffer that is written at `past_length`."""
    node = made_by(present, "TensorScatter")
    if node is None or present is None or len(node.inputs) != 3:
        return None
    past, entries, length = node.inputs
    if past is None or entries is None or length is None:
        return None
    in_place = (
        past.is_graph_input()
        and length.is_graph_input()
        and length.name == PAST_LENGTH
        and int_attribute(node, "axis", -2) in (2, -2)
        and {use.node for use in present.uses()} == {attention}
        and present.is_graph_output()
    )
    mode = node.attributes.get("mode")
    linear = mode is None or mode.as_string() == "linear"
    return Cache(past, present, entries) if in_place and linear else None


def _coded(value: ir.Value | None) -> Cache | None:
    """Codes of the past behind which those of the new entries are put, dequantized."""
    turn = made_by(value, "RotaryEmbedding")
    value = value if turn is None else turn.inputs[0]
    value, added = _without(value, "Add")
    value, multiplied = _without(value, "Mul")
    whole = made_by(value, "Concat")
    if whole is None or len(whole.inputs) != 2 or int_attribute(whole, "axis", 0) != _SLOT_AXIS:
        return None
    old, new = (made_by(part, "DequantizeLinear") for part in whole.inputs)
    past, codes = (None if node is None else node.inputs[0] for node in (old, new))
    rounding = made_by(codes, "QuantizeLinear")
    if old is None or new is None or rounding is None or past is None or codes is None:
        return None
    if not (past.is_graph_input() and codes.is_graph_output()) or past.dtype != codes.dtype:
        return None
    entries, divided = _without(rounding.inputs[0], "Div")
    entries, subtracted = _without(entries, "Sub")
    units = [unit for node in (rounding, old, new) if (unit := _unit(node)) is not None]
    if entries is None or len(units) != 3 or any(not np.array_equal(unit, units[0]) for unit in units):
        return None
    numbers = _of_channels(entries, [units[0], divided, multiplied, subtracted, added])
    if numbers is None:
        return None
    unit, by, times, offset, back = numbers
    assert unit is not None
    scale = unit if by is None else unit * by
    offset = np.zeros_like(unit) if offset is None else offset
    outside = None if by is None or times is not None else by
    undone = (times is None or (by is not None and np.array_equal(times, by))) and (
        back is None or np.array_equal(back, offset)
    )
    restored = back is not None or not offset.any()
    return Cache(past, codes, entries, scale, offset, outside, restored, turn) if undone else None


def _without(value: ir.Value | None, op_type: str) -> tuple[ir.Value | None, Floats | None]:
    """What a node applies a constant to, and the constant; the value itself where there is no such node."""
    node = made_by(value, op_type)
    operand = None if node is None else constant_values(input_of(node, 1))
    return (value, None) if node is None or operand is None else (node.inputs[0], operand)


def _unit(node: ir.Node) -> Floats | None:
    """The scale of Q/DQ, [1, 1] or [K, 1]; None where it has a zero point or another axis."""
    scale, zero_point = constant_values(node.inputs[1]), constant_values(input_of(node, 2))
    if scale is None or zero_point is None or zero_point.astype(np.float32).any() or scale.ndim > 1:
        return None
    if scale.ndim == 1 and int_attribute(node, "axis", 1) != 1:
        return None
    return scale.astype(np.float32).reshape(-1, 1)


def _of_channels(entries: ir.Value, constants: Sequence[Floats | None]) -> list[Floats | None] | None:
    """Constants of heads and channels of entries [B, K, S, D] as [K, D]; None where one is of something else."""
    heads, head_dim = static_dim(entries, 1), static_dim(entries, 3)
    if heads is None or head_dim is None:
        return None
    found: list[Floats | None] = []
    for numbers in constants:
        if numbers is not None and numbers.ndim == 4 and numbers.shape[0] == numbers.shape[2] == 1:
            numbers = numbers[0, :, 0]
        if numbers is None:
            found.append(None)
        elif numbers.ndim == 2 and numbers.shape[0] in (1, heads) and numbers.shape[1] in (1, head_dim):
            found.append(np.array(np.broadcast_to(numbers, (heads, head_dim)), np.float32))
        else:
            return None
    return found
