"""Float caches in 16 bits, which the kernels widen as they read them."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from kvgraph.export.passes import packed_operators as packed

_HALF = ir.TensorType(ir.DataType.FLOAT16)


def narrow_caches(model: ir.Model, names: Collection[str]) -> bool:
    """Make float32 caches float16 where kvgraph's attention alone reads and writes them.

    Args:
        model: A graph with `CachedAttention` nodes.
        names: Graph inputs, keys and values; a layer changes where both of its are among them.
    """
    changed = False
    for node in model.graph:
        if node.op_type != packed.ATTENTION or node.domain != packed.DOMAIN:
            continue
        past = [value for value in node.inputs[2:4] if value is not None]
        if all(value.name in names and value.dtype == ir.DataType.FLOAT for value in past):
            for value in (*past, *node.outputs[1:3]):
                value.type = _HALF
            changed = True
    return changed
