"""Products over [B, N, E] as they are, without a detour over [B * N, E]."""

from __future__ import annotations

import onnx_ir as ir

from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.matching import input_of, made_by, sole_reader, static_dim
from kvgraph.export.passes.packed_operators import RESIDUAL, X


def keep_rows(model: ir.Model) -> bool:
    """Take away the `Reshape` before and after a `PackedLinear`, which reads inputs of any rank.

    Rule: the first one flattens [B, N, E] to rows of E, the second one makes [B, N, M] of the rows of the result, and
    nothing else reads what lies between. A `Gemm` needs them, and with them the arithmetic that gives the shape.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type != packed.LINEAR or node.domain != packed.DOMAIN:
            continue
        before, after = made_by(input_of(node, X), "Reshape"), sole_reader(node.outputs[0])
        if (
            before is None
            or after is None
            or after.op_type != "Reshape"
            or input_of(node, RESIDUAL) is not None
        ):
            continue
        source, result = before.inputs[0], after.outputs[0]
        rows = input_of(node, X)
        if source is None or rows is None or not is_round_trip(source, rows, node.outputs[0], result):
            continue
        new = packed.operator(
            node.op_type, [source, *node.inputs[1:]], list(node.attributes.values()), f"{node.name}+"
        )
        model.graph.insert_before(after, new)
        packed.replace(model.graph, result, new)
        changed = True
    return changed


def is_round_trip(source: ir.Value, rows: ir.Value, product: ir.Value, result: ir.Value) -> bool:
    """Whether reshapes make rows [B * N, E] of [B, N, E], and [B, N, M] of what is computed of each row.

    Args:
        source: [B, N, E].
        rows: [B * N, E].
        product: [B * N, M].
        result: [B, N, M].
    """
    if rows.shape is None or source.shape is None or result.shape is None:
        return False
    leading = [dim if isinstance(dim, int) else dim.value for dim in source.shape][:-1]
    found = [dim if isinstance(dim, int) else dim.value for dim in result.shape][:-1]
    return (
        len(rows.shape) == 2
        and None not in leading
        and leading == found
        and static_dim(source, -1) is not None
        and static_dim(source, -1) == static_dim(rows, -1)
        and static_dim(result, -1) is not None
        and static_dim(result, -1) == static_dim(product, -1)
    )
