"""Finding a part of a graph that is given as a small graph of its own."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from kvgraph.export.passes.matching import constant_values

_OPSET = 24
# Of constants that are compared by content.
_MOST_ELEMENTS = 1 << 12
_COMMUTATIVE = ("Add", "And", "Equal", "Mul")

# A value of the pattern -> that of the graph.
_Bound = dict[ir.Value, ir.Value]


def match_pattern(pattern: ir.Graph, value: ir.Value) -> dict[str, ir.Value] | None:
    """What the inputs of a pattern are in a graph, if a value is computed as the pattern's only output is.

    Rules:
        * Nodes have the same operators and attributes; what a node leaves out has the default of the standard.
        * Initializers of the pattern are constants of the same type, shape and content.
        * Inputs of the pattern are any values, the same one wherever the pattern reads one.
        * Sums and products may have their operands in the other order.

    Args:
        pattern: In standard operators.
        value: A value of the graph.
    """
    bound = _match(pattern.outputs[0], value, {})
    if bound is None:
        return None
    return {f"{given.name}": bound[given] for given in pattern.inputs if given in bound}


def _match(pattern: ir.Value | None, value: ir.Value | None, bound: _Bound) -> _Bound | None:
    """The bound values and those of another pair, None where the two do not fit."""
    if pattern is None or value is None:
        return bound if pattern is value else None
    if pattern.const_value is not None:
        return bound if _same_constant(pattern.const_value, value) else None
    if pattern in bound:
        return bound if _same_value(bound[pattern], value) else None
    node, found = pattern.producer(), value.producer()
    if node is None:
        return {**bound, pattern: value}
    if (
        found is None
        or (node.op_type, node.domain) != (found.op_type, found.domain)
        or pattern.index() != value.index()
        or _attributes(node) != _attributes(found)
    ):
        return None
    inputs = list(found.inputs)
    matched = _match_inputs(node, inputs, {**bound, pattern: value})
    if matched is None and node.op_type in _COMMUTATIVE:
        matched = _match_inputs(node, inputs[::-1], {**bound, pattern: value})
    return matched


def _match_inputs(node: ir.Node, values: list[ir.Value | None], bound: _Bound) -> _Bound | None:
    if len(node.inputs) != len(values):
        return None
    matched: _Bound | None = bound
    for pattern, value in zip(node.inputs, values, strict=True):
        matched = None if matched is None else _match(pattern, value, matched)
    return matched


def _same_value(one: ir.Value, other: ir.Value) -> bool:
    """Whether two values are one, or constants of one content."""
    if one is other:
        return True
    tensor = one.const_value
    return tensor is not None and tensor.size <= _MOST_ELEMENTS and _same_constant(tensor, other)


def _same_constant(expected: ir.TensorProtocol, value: ir.Value) -> bool:
    if value.dtype != expected.dtype:
        return False
    values = constant_values(value)
    return values is not None and np.array_equal(values, expected.numpy())


def _attributes(node: ir.Node) -> dict[str, Any]:
    given = {name: _plain(attribute.value) for name, attribute in node.attributes.items()}
    return _defaults(node.op_type) | given


@functools.cache
def _defaults(op_type: str) -> dict[str, Any]:
    """What the attributes of an operator are where a node does not say."""
    attributes = onnx.defs.get_schema(op_type, _OPSET).attributes
    given = {name: onnx.helper.get_attribute_value(found.default_value) for name, found in attributes.items()
             if found.default_value.type}  # fmt: skip
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in given.items()}


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
