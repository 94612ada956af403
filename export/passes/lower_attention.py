"""Attention as plain matrix products, where TensorRT has no kernel for the operator.

TensorRT-RTX 1.7 parses `Attention`-24, but may not build it for 16-bit types whose head dimension is not a multiple of
8, even when it is marked decomposable ("tactics_tiled_layout.cpp: CHECK(op->input_layouts().size() > idx) failed"; it
depends on where the mask comes from). It rejects `softcap` and `softmax_precision`. These nodes become MatMul, Where or
Add, Softmax, MatMul, which build at every size.

Forms that TensorRT would reject with an obscure message, or parse and ignore (`nonpad_kv_seqlen`), are refused here.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.passes.constants import int64_constant, scalar

_MASK, _FIRST_STATE_INPUT = 3, 4
_HALF_TYPES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def lower_attention(model: ir.Model) -> bool:
    """Rewrite the Attention nodes that TensorRT cannot build.

    Rules:
        * A 16-bit node whose head dimension is not a multiple of 8, or any node with `softcap` or
          `softmax_precision`, is written out; query heads are grouped by the key/value head they read, so that keys
          and values are not repeated.
        * A boolean mask puts the lowest finite number on hidden scores: a row that sees nothing stays finite.
        * Every other node stays.

    Raises:
        ValueError: A node has a past, lengths, `is_causal` or three-dimensional inputs, none of which the contract has.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type == "Attention" and node.domain == "":
            _refuse_unknown_form(model.graph, node)
            if _needs_lowering(node):
                _lower(model.graph, node)
                changed = True
    return changed


def _refuse_unknown_form(graph: ir.Graph, node: ir.Node) -> None:
    found = None
    if any(value is not None for value in node.inputs[_FIRST_STATE_INPUT:]):
        found = "a past or per-row lengths as inputs"
    elif len(node.outputs) > 1:
        found = "more than one output"
    elif _int(node, "is_causal"):
        found = "is_causal"
    elif any(value is None or value.shape is None or len(value.shape) != 4 for value in node.inputs[:3]):
        found = "inputs that are not [B, heads, tokens, D]"
    if found is not None:
        raise ValueError(
            f"{graph.name}: node {node.name!r} (Attention) has {found}, which TensorRT rejects or ignores; "
            "expected four-dimensional query, key and value with an explicit mask"
        )


def _needs_lowering(node: ir.Node) -> bool:
    if node.attributes.get("softmax_precision") is not None or _float(node, "softcap") != 0:
        return True
    return _dtype(node) in _HALF_TYPES and _dimension(node, 0, 3) % 8 != 0


def _lower(graph: ir.Graph, node: ir.Node) -> None:
    """Replace one node by its definition; scores are [B, K, H / K, S, C], heads grouped by the keys they read."""
    heads, kv_heads, head_dim = _dimension(node, 0, 1), _dimension(node, 1, 1), _dimension(node, 0, 3)
    tape, dtype = Tape(), _dtype(node)
    scale = node.attributes.get("scale")
    factor = scalar(graph, head_dim**-0.5 if scale is None else scale.as_float(), dtype)
    group_axis = int64_constant(graph, 2)
    grouped = int64_constant(graph, 0, kv_heads, heads // kv_heads, -1, head_dim)
    query = tape.op("Mul", [tape.op("Reshape", [_input(node, 0), grouped]), factor])
    key = tape.op("Transpose", [_input(node, 1)], {"perm": [0, 1, 3, 2]})
    scores = tape.op("MatMul", [query, tape.op("Unsqueeze", [key, group_axis])])
    if softcap := _float(node, "softcap"):
        cap = scalar(graph, softcap, dtype)
        scores = tape.op("Mul", [tape.op("Tanh", [tape.op("Div", [scores, cap])]), cap])
    if len(node.inputs) > _MASK and node.inputs[_MASK] is not None:
        scores = _masked(graph, tape, node, scores)
    weights = _softmax(tape, node, scores)
    result = tape.op("MatMul", [weights, tape.op("Unsqueeze", [_input(node, 2), group_axis])])
    result = tape.op("Reshape", [result, int64_constant(graph, 0, heads, -1, _dimension(node, 2, 3))])
    for index, new in enumerate(tape.nodes):
        new.name = f"{node.name}/{index}_{new.op_type}"
        new.outputs[0].name = f"{node.outputs[0].name}/{index}_{new.op_type}"
    ir.convenience.replace_nodes_and_values(graph, node, [node], tape.nodes, node.outputs, [result])


def _masked(graph: ir.Graph, tape: Tape, node: ir.Node, scores: ir.Value) -> ir.Value:
    """Scores under a mask [B, 1, S, C] or [B, H, S, C]."""
    kv_heads, masks = _dimension(node, 1, 1), _dimension(node, _MASK, 1)
    mask = tape.op("Unsqueeze", [_input(node, _MASK), int64_constant(graph, 2)])
    if masks not in (1, kv_heads):
        # Grouped as the query heads are; 0 keeps a dimension.
        mask = tape.op("Reshape", [mask, int64_constant(graph, 0, kv_heads, masks // kv_heads, 0, 0)])
    if _input(node, _MASK).dtype != ir.DataType.BOOL:
        return tape.op("Add", [scores, mask])
    return tape.op("Where", [mask, scores, scalar(graph, float(_dtype(node).min), _dtype(node))])


def _softmax(tape: Tape, node: ir.Node, scores: ir.Value) -> ir.Value:
    precision = node.attributes.get("softmax_precision")
    if precision is None:
        return tape.op("Softmax", [scores], {"axis": -1})
    weights = tape.op("Softmax", [tape.op("Cast", [scores], {"to": precision.as_int()})], {"axis": -1})
    return tape.op("Cast", [weights], {"to": int(_dtype(node))})


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert (
        value is not None
    )  # _refuse_unknown_form has looked at query, key and value; callers ask for the mask
    return value


def _dtype(node: ir.Node) -> ir.DataType:
    dtype = _input(node, 0).dtype
    assert dtype is not None  # every value of a traced graph has a type
    return dtype


def _dimension(node: ir.Node, index: int, axis: int) -> int:
    """A dimension of an input that has to be a number."""
    value = _input(node, index)
    dim = None if value.shape is None else value.shape[axis]
    if not isinstance(dim, int):
        raise ValueError(
            f"node {node.name!r} (Attention): dimension {axis} of input {value.name!r} is {dim}, expected a number; "
            "export the bundle again"
        )
    return dim


def _float(node: ir.Node, name: str) -> float:
    attribute = node.attributes.get(name)
    return 0.0 if attribute is None else attribute.as_float()


def _int(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()
