"""Whether one graph can do the work of both."""

from __future__ import annotations

import onnx

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GraphName


def has_one_recipe(bundle: Bundle) -> bool:
    """Whether prefill and decode are quantized alike."""
    return bundle.recipe is None or bundle.recipe["prefill"] == bundle.recipe["decode"]


def shares_weights(bundle: Bundle) -> bool:
    """Whether prefill and decode have one recipe and read the same weights.

    The prefill graph can then do a decode step, too: with S = 1 and logit_positions = 0 it is the same computation.
    """
    return has_one_recipe(bundle) and _weights(bundle, "prefill") == _weights(bundle, "decode")


def _weights(bundle: Bundle, graph: GraphName) -> set[tuple[tuple[str, str], ...]]:
    """Where a graph's external data lie: location, offset and length of each tensor."""
    model = onnx.load(bundle.graph_path(graph), load_external_data=False)
    return {
        tuple(sorted((entry.key, entry.value) for entry in tensor.external_data))
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
