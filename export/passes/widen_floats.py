"""16-bit graphs for runtimes that compute in float32."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

_FLOAT = ir.TensorType(ir.DataType.FLOAT)


def widen_floats(model: ir.Model, dtypes: Collection[ir.DataType] = (ir.DataType.BFLOAT16,)) -> bool:
    """Make every value of some narrow types float32; weights stay as they are stored.

    Rules:
        * An initializer is read through one `Cast` to float32, shared by its readers.
        * Inputs, outputs and results of nodes become float32; so do constants and the targets of casts.

    ONNX Runtime CPU has no MatMul, Add, Sigmoid or Attention for bfloat16, and has that Cast: it applies it once, while
    it loads. Nothing is lost: every number of 16 bits is a float32 number.

    Args:
        model: A graph.
        dtypes: BFLOAT16, FLOAT16 or both.
    """
    changed = [_read_widened(model.graph, value, dtypes) for value in list(model.graph.initializers.values())]
    for node in model.graph:
        changed.append(_widen_attributes(node, dtypes))
        changed += [_widen(value, dtypes) for value in node.outputs]
    changed += [_widen(value, dtypes) for value in model.graph.inputs]
    return any(changed)


def _read_widened(graph: ir.Graph, weight: ir.Value, dtypes: Collection[ir.DataType]) -> bool:
    """Put a Cast between a narrow initializer and its readers."""
    if weight.dtype not in dtypes:
        return False
    readers = [(use.node, use.idx) for use in weight.uses() if not _casts_to_float(use.node)]
    if not readers:
        return False
    cast = ir.Node("", "Cast", [weight], [ir.AttrInt64("to", ir.DataType.FLOAT)], name=f"{weight.name}.widen")
    widened = cast.outputs[0]
    widened.name, widened.type, widened.shape = f"{weight.name}.float32", _FLOAT, weight.shape
    for node, index in readers:
        node.replace_input_with(index, widened)
    graph.insert_before(graph[0], cast)
    return True


def _casts_to_float(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.attributes["to"].as_int() == ir.DataType.FLOAT


def _widen(value: ir.Value, dtypes: Collection[ir.DataType]) -> bool:
    if value.dtype not in dtypes:
        return False
    value.type = _FLOAT
    return True


def _widen_attributes(node: ir.Node, dtypes: Collection[ir.DataType]) -> bool:
    """Float32 in place of narrow types in constants and in attributes that name a type."""
    changed = False
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in dtypes:
            tensor = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
            node.attributes[name] = ir.AttrTensor(name, tensor)
            changed = True
        elif name in ("to", "softmax_precision", "output_dtype") and attribute.as_int() in dtypes:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT)
            changed = True
    return changed
