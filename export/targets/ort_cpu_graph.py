"""A bundle's graphs in the operators and types that ONNX Runtime has on a CPU. All of it happens in memory."""

from __future__ import annotations

import onnx_ir as ir

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, GraphName
from kvgraph.export.passes.lower_float4 import lower_float4
from kvgraph.export.passes.widen_bfloat16 import widen_bfloat16

_FLOAT4 = "float4_e2m1"


def needs_lowering(bundle: Bundle) -> bool:
    """Whether the canonical graphs hold something that ONNX Runtime does not compute on a CPU."""
    return bundle.dtype == "bfloat16" or any(entry["dtype"] == _FLOAT4 for entry in bundle.weights.values())


def lower_for_ort_cpu(bundle: Bundle) -> dict[GraphName, bytes]:
    """Both graphs, serialized: 4-bit floats as integers, bfloat16 as float32; their weights are the bundle's."""
    graphs: dict[GraphName, bytes] = {}
    for graph in GRAPHS:
        model = ir.load(bundle.graph_path(graph))
        lower_float4(model)
        widen_bfloat16(model)
        graphs[graph] = ir.to_proto(model).SerializeToString()
    return graphs
