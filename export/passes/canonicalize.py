"""What every traced piece goes through before it is instantiated.

Passes run on pieces and not on whole graphs, so that their cost does not grow with the number of layers.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from kvgraph.export.passes.static_reshape import make_reshapes_static


def canonicalize(graph: ir.Graph) -> bool:
    """Reduce a traced piece to the operators that compute.

    Rules: shape arithmetic gives way to static reshapes; constants are folded; identities, repeated subexpressions,
    dead nodes and the tracer's notes go; constants become initializers. Parameters take no part: their values are
    unknown here, and stay where the weights file puts them.
    """
    for parameter in graph.initializers.values():
        parameter.const_value = None
    model = ir.Model(graph, ir_version=10)
    changed = make_reshapes_static(model)
    changed |= optimizer.fold_constants(model, onnx_shape_inference=True).modified
    for final in (
        common.IdentityEliminationPass(),
        common.CommonSubexpressionEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.RemoveUnusedNodesPass(),
        common.ClearMetadataAndDocStringPass(),
    ):
        changed |= final(model).modified
    return changed
