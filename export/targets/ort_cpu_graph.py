"""A bundle's graphs in the operators and types that ONNX Runtime has on a CPU. All of it happens in memory."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
from onnx_ir.passes import common

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GraphName
from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.fuse_cached_attention import fuse_cached_attention
from kvgraph.export.passes.fuse_linears import fuse_activations, fuse_biases, fuse_gates, fuse_residuals
from kvgraph.export.passes.keep_rows import keep_rows
from kvgraph.export.passes.lower_float4 import lower_float4
from kvgraph.export.passes.pack_experts import pack_experts
from kvgraph.export.passes.pack_linears import pack_linears
from kvgraph.export.passes.remove_casts import remove_casts
from kvgraph.export.passes.remove_row_scales import remove_row_scales
from kvgraph.export.passes.widen_floats import widen_floats
from kvgraph.export.targets.shared_weights import shares_weights

_SHAPES = ("Concat", "GatherND", "Range", "Reshape", "Shape", "Squeeze", "Unsqueeze")
_FLOAT4 = "float4_e2m1"

# In this order: each one matches what those before it have made.
_KERNEL_PASSES = (
    remove_casts,
    remove_row_scales,
    pack_experts,
    pack_linears,
    fuse_biases,
    keep_rows,
    fuse_gates,
    fuse_activations,
    fuse_cached_attention,
    fuse_residuals,
)


def needs_lowering(bundle: Bundle) -> bool:
    """Whether the canonical graphs hold something that ONNX Runtime does not compute on a CPU."""
    return bundle.dtype == "bfloat16" or any(entry["dtype"] == _FLOAT4 for entry in bundle.weights.values())


def lower_for_ort_cpu(bundle: Bundle) -> dict[GraphName, bytes]:
    """The graphs, serialized: 4-bit floats as integers, bfloat16 as float32; their weights are the bundle's."""
    graphs: dict[GraphName, bytes] = {}
    for graph in bundle.contract.graphs:
        model = ir.load(bundle.graph_path(graph))
        lower_float4(model)
        widen_floats(model)
        graphs[graph] = ir.to_proto(model).SerializeToString()
    return graphs


def lower_for_kernels(bundle: Bundle) -> dict[GraphName, ir.Model]:
    """The graphs in kvgraph's own operators where these have a form of it, and in float32; weights are still to pack.

    Prefill alone where it can do decode's work as well: there is one session then, which packs nothing twice.
    """
    models = {graph: lower_to_kernels(ir.load(bundle.graph_path(graph))) for graph in bundle.contract.graphs}
    if shares_weights(bundle) and _computes_the_same(models["prefill"], models["decode"]):
        del models["decode"]
    return models


def _computes_the_same(one: ir.Model, other: ir.Model) -> bool:
    """Whether graphs differ in no more than shapes and rows; experts that are not packed differ in decode."""
    counts = [
        Counter(node.op_type for node in model.graph if node.op_type not in _SHAPES) for model in (one, other)
    ]
    return counts[0] == counts[1]


def lower_to_kernels(model: ir.Model) -> ir.Model:
    """One canonical graph, changed in place."""
    lower_float4(model)
    widen_floats(model, (ir.DataType.BFLOAT16, ir.DataType.FLOAT16))
    for lower in _KERNEL_PASSES:
        lower(model)
        # What has been replaced still counts as a reader of what it read.
        common.RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[packed.DOMAIN] = packed.VERSION
    return model
