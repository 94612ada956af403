"""The experts of a layer as `PackedExperts`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from kvgraph.export.packed.stored_matrix import StoredMatrix
from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.expert_patterns import constants, patterns
from kvgraph.export.passes.keep_rows import is_round_trip
from kvgraph.export.passes.match_pattern import match_pattern
from kvgraph.export.passes.matching import constant_values, int_attribute, made_by, sole_reader, static_dim
from kvgraph.export.passes.stored_weights import stored_experts


def pack_experts(model: ir.Model) -> bool:
    """Replace what computes the chosen experts of a layer, in any form of `kvgraph.models.experts`, by one operator.

    Rules:
        * The three projections have a packed form, see `stored_experts`; gate and up the same one. Integers round their
          input, as those of `pack_linears` do: the canonical graphs compute experts in floats.
        * Experts read [B, S, E] as it is, without a detour over rows; so does the router, if all that it consists of
          works along the last axis.
        * Experts in another form, or with weights that have no packed one, stay.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type != "ReduceSum" or node.domain:
            continue
        found = _experts(node.outputs[0])
        if found is not None:
            _put(model.graph, found)
            changed = True
    return changed


@dataclass(frozen=True, slots=True)
class _Experts:
    """Experts of a layer.

    Attributes:
        activation: Its name in the operator.
        inputs: x [N, E], chosen [N, k] and shares [N, k].
        gate: The matrix of each expert.
        up: Likewise.
        down: Likewise.
        result: [N, E].
    """

    activation: str
    inputs: tuple[ir.Value, ir.Value, ir.Value]
    gate: tuple[StoredMatrix, ...]
    up: tuple[StoredMatrix, ...]
    down: tuple[StoredMatrix, ...]
    result: ir.Value


def _experts(result: ir.Value) -> _Experts | None:
    """The experts that give a value, if they have the operator's form."""
    for activation, pattern in patterns():
        found = match_pattern(pattern, result)
        if found is None:
            continue
        gate, up, down = (stored_experts(found[name]) for name in ("gate", "up", "down"))
        if gate is None or up is None or down is None:
            return None
        inputs = (found["x"], found["chosen"], found["weights"])
        experts = _Experts(activation, inputs, gate, up, down, result)
        return experts if _fits(experts, found) else None
    return None


def _fits(experts: _Experts, found: dict[str, ir.Value]) -> bool:
    """Whether sizes agree with one another, and with the constants that the graph computes with."""
    x, chosen, shares = experts.inputs
    top_k, hidden_size = static_dim(chosen, -1), experts.gate[0].in_features
    count, size = len(experts.gate), experts.gate[0].out_features
    if top_k is None or static_dim(x, -1) != hidden_size or static_dim(shares, -1) != top_k:
        return False
    forms = [
        {(matrix.kind, matrix.block_size, matrix.in_features, matrix.out_features) for matrix in part}
        for part in (experts.gate, experts.up, experts.down)
    ]
    alike = forms[0] == forms[1] and len(forms[0]) == 1 and len(experts.down) == len(experts.up) == count
    turned = (experts.down[0].in_features, experts.down[0].out_features) == (size, hidden_size)
    expected = constants(count, top_k, hidden_size)
    numbers = {name: constant_values(value) for name, value in found.items() if name in expected}
    return (
        alike
        and turned
        and shares.dtype == x.dtype == ir.DataType.FLOAT
        and chosen.dtype == ir.DataType.INT64
        and all(
            given is not None and np.array_equal(given, expected[name]) for name, given in numbers.items()
        )
    )


def _put(graph: ir.Graph, experts: _Experts) -> None:
    """Let the operator give the experts' result."""
    (x, chosen, shares), result = experts.inputs, experts.result
    node = result.producer()
    assert node is not None
    detour, back = made_by(x, "Reshape"), sole_reader(result)
    source = None if detour is None else detour.inputs[0]
    if (
        source is not None
        and back is not None
        and back.op_type == "Reshape"
        and is_round_trip(source, x, result, back.outputs[0])
    ):
        _lift_router(x, source, (chosen, shares))
        x, result = source, back.outputs[0]
    gate_up = packed.stacked_value(
        list(zip(experts.gate, experts.up, strict=True)), _name(experts.gate[0], experts.up[0]), gated=True
    )
    down = packed.stacked_value([[matrix] for matrix in experts.down], _name(experts.down[0]))
    attributes = [
        ir.AttrInt64("num_experts", len(experts.gate)),
        ir.AttrInt64("hidden_size", experts.gate[0].in_features),
        ir.AttrInt64("intermediate_size", experts.gate[0].out_features),
        ir.AttrString("gate", experts.activation),
        ir.AttrString("input", _rounding(experts.gate[0])),
        ir.AttrString("down_input", _rounding(experts.down[0])),
    ]
    inputs = [x, chosen, shares, gate_up, down, None]
    new = packed.operator(packed.EXPERTS, inputs, attributes, f"{node.name}/experts")
    graph.insert_after(node, new)
    packed.replace(graph, result, new)


def _name(*first: StoredMatrix) -> str:
    """Of a weight, from the names of the first expert's matrices, which end in its number."""
    return "+".join(f"{matrix.codes.name}".removesuffix(".0") for matrix in first)


def _rounding(matrix: StoredMatrix) -> str:
    return "float" if matrix.kind == "float" else "block"


def _lift_router(rows: ir.Value, source: ir.Value, results: tuple[ir.Value, ...]) -> None:
    """Let a router read [B, S, E] instead of its rows, where it works along the last axis alone."""
    nodes: dict[ir.Node, None] = {}
    waiting = [result.producer() for result in results]
    while waiting:
        node = waiting.pop()
        if node is None or node.domain or not _is_by_row(node):
            return
        nodes[node] = None
        if node.inputs[0] is not rows:
            waiting.append(None if node.inputs[0] is None else node.inputs[0].producer())
    assert source.shape is not None
    leading = list(source.shape)[:-1]
    for node in nodes:
        for index, value in enumerate(node.inputs):
            if value is rows:
                node.replace_input_with(index, source)
        for value in node.outputs:
            value.shape = ir.Shape([*leading, static_dim(value, -1)])


def _is_by_row(node: ir.Node) -> bool:
    """Whether a node of a router does with [B, S, M] what it does with rows."""
    if node.op_type == "MatMul":
        weight = node.inputs[1]
        return weight is not None and weight.shape is not None and len(weight.shape) == 2
    return node.op_type in ("Softmax", "TopK") and int_attribute(node, "axis", -1) == -1
