"""Products of one input as one product."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.constants import constant
from kvgraph.export.passes.matching import constant_values, input_of, text_attribute
from kvgraph.export.passes.packed_operators import BIAS, RESIDUAL, WEIGHT, X, packed_weight


def can_join(nodes: Sequence[ir.Node], gated: bool = False) -> bool:
    """Whether `PackedLinear` nodes have one input, rounded in one way, weights of one form and nothing fused to them.

    Args:
        nodes: The products.
        gated: They are a gate and what it gates, which have as many columns.
    """
    first = nodes[0]
    weights = [packed_weight(input_of(node, WEIGHT)) for node in nodes]
    whole = [weight for weight in weights if weight is not None and not weight.gated]
    forms = {(part.kind, part.block_size) for weight in whole for part in weight.parts}
    alike = (
        input_of(node, X) is input_of(first, X) and _rounding(node) == _rounding(first) for node in nodes
    )
    if len(whole) != len(nodes) or len(forms) != 1 or not all(alike) or not all(map(is_bare, nodes)):
        return False
    return not gated or (len({weight.out_features for weight in whole}) == 1 and len(whole) == 2)


def join(graph: ir.Graph, nodes: Sequence[ir.Node], name: str, gated: bool = False) -> ir.Node:
    """A product, not yet in the graph, whose columns are those of some others in order."""
    x, weights = input_of(nodes[0], X), [packed_weight(input_of(node, WEIGHT)) for node in nodes]
    assert x is not None
    parts = [part for weight in weights if weight is not None for part in weight.parts]
    rounding, scale = _rounding(nodes[0])
    value = packed.weight_value(*parts, gated=gated)
    return packed.linear(x, value, _joined_bias(graph, nodes, name), rounding, scale, name)


def is_bare(node: ir.Node) -> bool:
    """Whether a `PackedLinear` has neither an activation nor a residual yet."""
    activations = [text_attribute(node, name, "") for name in ("gate", "activation")]
    return input_of(node, RESIDUAL) is None and not any(activations)


def _joined_bias(graph: ir.Graph, nodes: Sequence[ir.Node], name: str) -> ir.Value | None:
    if all(input_of(node, BIAS) is None for node in nodes):
        return None
    parts = []
    for node in nodes:
        values, weight = constant_values(input_of(node, BIAS)), packed_weight(input_of(node, WEIGHT))
        assert weight is not None
        parts.append(np.zeros(weight.out_features) if values is None else values.reshape(-1))
    return constant(graph, f"{name}/bias", np.concatenate([part.astype(np.float32) for part in parts]))


def _rounding(node: ir.Node) -> tuple[str, float | None]:
    scale = node.attributes.get("input_scale")
    return text_attribute(node, "input", ""), None if scale is None else scale.as_float()
