"""What follows a `PackedLinear` becomes part of it: bias, activation and residual; gate and up become one."""

from __future__ import annotations

import onnx_ir as ir

from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.join_linears import can_join, is_bare, join
from kvgraph.export.passes.matching import (
    constant_values,
    input_of,
    made_by,
    other_input,
    sole_reader,
    static_dim,
    text_attribute,
)
from kvgraph.export.passes.packed_operators import BIAS, EXPERTS_RESIDUAL, RESIDUAL

# Which input of an operator is added to its result.
_RESIDUALS = {packed.LINEAR: RESIDUAL, packed.EXPERTS: EXPERTS_RESIDUAL}


def fuse_biases(model: ir.Model) -> bool:
    """`Add` of a vector to a product that nothing else reads: the product's `bias`."""
    changed = False
    for node in _linears(model.graph):
        result = node.outputs[0]
        reader = sole_reader(result)
        if reader is None or reader.op_type != "Add" or not is_bare(node) or input_of(node, BIAS) is not None:
            continue
        bias = other_input(reader, result)
        values = constant_values(bias)
        if values is not None and values.shape == (static_dim(result, -1),):
            _put(model.graph, _like(node, BIAS, bias), reader)
            changed = True
    return changed


def fuse_gates(model: ir.Model) -> bool:
    """`act(x G) * (x U)` of two products with one input, read by nothing else: one product with a `gate`.

    Its weight has the panels of G and U in turns, its bias those of G, then of U; a missing one is zeros.
    """
    changed = False
    for node in _linears(model.graph):
        found = _activation_of(node.outputs[0])
        product = None if found is None else sole_reader(found[1].outputs[0])
        if found is None or product is None or product.op_type != "Mul":
            continue
        up = made_by(other_input(product, found[1].outputs[0]), packed.LINEAR, packed.DOMAIN)
        if up is None or sole_reader(up.outputs[0]) is not product or not can_join([node, up], gated=True):
            continue
        joined = join(model.graph, [node, up], f"{node.name}/gated", gated=True)
        joined.attributes["gate"] = ir.AttrString("gate", found[0])
        _put(model.graph, joined, product)
        changed = True
    return changed


def fuse_activations(model: ir.Model) -> bool:
    """An activation that alone reads a product: the product's `activation`."""
    changed = False
    for node in _linears(model.graph):
        found = _activation_of(node.outputs[0])
        if found is not None and is_bare(node):
            new = _like(node, RESIDUAL, None)
            new.attributes["activation"] = ir.AttrString("activation", found[0])
            _put(model.graph, new, found[1])
            changed = True
    return changed


def fuse_residuals(model: ir.Model) -> bool:
    """`Add` of a value of the same shape to a product that nothing else reads: the product's `residual`.

    The sum of a layer's experts takes one as well.
    """
    changed = False
    for node in list(model.graph):
        index = _RESIDUALS.get(node.op_type) if node.domain == packed.DOMAIN else None
        if index is None or input_of(node, index) is not None:
            continue
        result = node.outputs[0]
        reader = sole_reader(result)
        if reader is None or reader.op_type != "Add":
            continue
        residual = other_input(reader, result)
        if residual is not None and residual is not result and _same_shape(residual, result):
            _put(model.graph, _like(node, index, residual), reader)
            changed = True
    return changed


def _same_shape(one: ir.Value, other: ir.Value) -> bool:
    # Two dimensions without a name may differ.
    return (
        one.shape is not None
        and one.shape == other.shape
        and all(isinstance(dim, int) or dim.value is not None for dim in one.shape)
    )


def _linears(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type == packed.LINEAR and node.domain == packed.DOMAIN]


def _activation_of(value: ir.Value) -> tuple[str, ir.Node] | None:
    """The activation that alone reads a value: its name, and the node that gives its result."""
    readers = [use.node for use in value.uses()]
    if value.is_graph_output() or not readers or any(node.domain for node in readers):
        return None
    operators = {node.op_type: node for node in readers}
    if len(readers) == 1 and "Relu" in operators:
        return "relu", operators["Relu"]
    if len(readers) == 1 and "Gelu" in operators:
        gelu = operators["Gelu"]
        return "gelu_tanh" if text_attribute(gelu, "approximate", "none") == "tanh" else "gelu", gelu
    if len(readers) == 2 and operators.keys() == {"Mul", "Sigmoid"}:
        squashed, product = operators["Sigmoid"].outputs[0], operators["Mul"]
        if sole_reader(squashed) is product and other_input(product, value) is squashed:
            return "silu", product
    return None


def _like(node: ir.Node, index: int, value: ir.Value | None) -> ir.Node:
    """A copy of a product, with another input, that gives a value of its own."""
    # A node does not keep inputs that are left out at its end.
    count = max(len(node.inputs), index + 1)
    inputs = [value if position == index else input_of(node, position) for position in range(count)]
    return packed.operator(node.op_type, inputs, list(node.attributes.values()), f"{node.name}+")


def _put(graph: ir.Graph, new: ir.Node, last: ir.Node) -> None:
    """Let a new node stand for `last` and give its result; what it replaces is left without readers."""
    graph.insert_before(last, new)
    packed.replace(graph, last.outputs[0], new)
