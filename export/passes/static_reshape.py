"""Reshapes without shape arithmetic."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def make_reshapes_static(model: ir.Model) -> bool:
    """Give every Reshape a constant target, where its recorded shapes allow one.

    Rules, for an output dimension at position i: a number stays; a symbol equal to the input's dimension i becomes 0
    (copied); at most one other becomes -1 (inferred). What does not fit is left as it was traced.

    A trace computes targets with Shape, Gather and Concat; a constant target needs none of them, and is what
    ONNX Runtime's and TensorRT's fusions match.
    """
    changed = False
    for node in model.graph:
        if node.op_type != "Reshape" or node.domain:
            continue
        target = _static_target(node.inputs[0], node.outputs[0])
        if target is None or _constant(node.inputs[1]) == target:
            continue
        shape = ir.Value(name=f"{node.outputs[0].name}.shape")
        attribute = ir.AttrTensor("value", ir.tensor(np.array(target, dtype=np.int64)))
        constant = ir.Node("", "Constant", [], [attribute], outputs=[shape], name=f"{node.name}.shape")
        model.graph.insert_before(node, constant)
        node.replace_input_with(1, shape)
        node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)
        changed = True
    return changed


def _static_target(value: ir.Value | None, result: ir.Value) -> list[int] | None:
    """A target of numbers, 0 and at most one -1; None where the shapes do not allow one."""
    if value is None or value.shape is None or result.shape is None:
        return None
    target: list[int] = []
    for index, dim in enumerate(result.shape):
        if isinstance(dim, int):
            # A real 0 cannot be told from "copy".
            if dim == 0:
                return None
            target.append(dim)
        elif index < len(value.shape) and dim.value is not None and value.shape[index] == dim:
            target.append(0)
        else:
            target.append(-1)
    return target if target.count(-1) <= 1 else None


def _constant(value: ir.Value | None) -> list[int] | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else [int(dim) for dim in tensor.numpy().reshape(-1)]
