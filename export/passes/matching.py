"""Reading a graph: what passes ask of values and nodes before they rewrite them."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

# Larger constants are weights, which passes do not read.
_MOST_ELEMENTS = 1 << 20


def made_by(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that gives a value, if it is of an operator."""
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type == op_type and node.domain == domain else None


def sole_reader(value: ir.Value) -> ir.Node | None:
    """The only node that reads a value, once; None where others do, or where it is an output of the graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer, also of one that is read through a `Cast` to float32: the numbers are the same."""
    if value is not None and (cast := made_by(value, "Cast")) is not None:
        if cast.attributes["to"].as_int() != ir.DataType.FLOAT:
            return None
        value = cast.inputs[0]
        if value is None or value.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT):
            return None
    return None if value is None or value.producer() is not None else value.const_value


def constant_values(value: ir.Value | None) -> NDArray[Any] | None:
    """The content of a small constant."""
    tensor = stored(value)
    return None if tensor is None or tensor.size > _MOST_ELEMENTS else tensor.numpy()


def constant_number(value: ir.Value | None) -> float | None:
    """The number of a constant of one element."""
    values = constant_values(value)
    return None if values is None or values.size != 1 else float(values.reshape(-1)[0])


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """An input of a node, None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def other_input(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """What a node of two inputs reads beside `value`."""
    first, second = node.inputs
    return second if first is value else first


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute of a node."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    """A float attribute of a node."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def text_attribute(node: ir.Node, name: str, default: str) -> str:
    """A string attribute of a node."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


def static_dim(value: ir.Value | None, axis: int) -> int | None:
    """A dimension of a value, if it is a number."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return dim if isinstance(dim, int) else None
