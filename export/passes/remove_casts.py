"""Casts that have come to do nothing."""

from __future__ import annotations

import onnx_ir as ir


def remove_casts(model: ir.Model) -> bool:
    """Let the readers of a `Cast` to the type that its input has read the input, which takes over an output's name."""
    changed = False
    for node in list(model.graph):
        value = node.inputs[0] if node.op_type == "Cast" and not node.domain else None
        if value is None or value.dtype != ir.DataType(node.attributes["to"].as_int()):
            continue
        result = node.outputs[0]
        if result.is_graph_output():
            if value.producer() is None or value.is_graph_output():
                continue
            value.name, result.name = result.name, f"{result.name}/cast"
        ir.convenience.replace_all_uses_with(result, value, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        changed = True
    return changed
