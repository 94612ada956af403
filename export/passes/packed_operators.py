"""The operators of kvgraph's CPU kernels, as nodes: domain "kvgraph", version 1.

* `PackedLinear(x [..., K], weight, bias [N], residual [..., M])`: act(x W + bias) + residual, [..., M].
* `PackedGather(weight, ids [...])`: columns of W, [..., K].
* `PackedExperts(x [..., E], chosen [..., k] int64, shares [..., k], gate_up, down, residual [..., E])`: the sum of
  what a token's chosen experts give, each times its share, + residual, [..., E]; a weight holds those of all experts.
* `CachedAttention(qkv [B, S, (H + 2 K) D], past_length [B], past_key [B, K, T, D], past_value, cos [B, S, R / 2], sin,
  q_norm [D], k_norm [D], key_cos [1, T, R / 2], key_sin, key_scale [K, D], key_offset, value_scale, value_offset)`:
  [B, S, H D], and the buffers with the new keys and values. Scales and offsets belong to codes of 8 bits; `key_cos` and
  `key_sin`, the angles of the slots, to keys that are kept without their rotary embedding.

Passes make and join these nodes before anything is packed: a weight is a value without content that knows what it will
hold. `kvgraph.export.packed.target_weights` packs them in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from kvgraph.export.packed.packed_weight import PackedWeight
from kvgraph.export.packed.stacked_weight import StackedWeight
from kvgraph.export.packed.stored_matrix import StoredMatrix

DOMAIN = "kvgraph"
VERSION = 1
LINEAR, GATHER, EXPERTS, ATTENTION = "PackedLinear", "PackedGather", "PackedExperts", "CachedAttention"
# Inputs of PackedLinear.
X, WEIGHT, BIAS, RESIDUAL = range(4)
# Inputs of PackedExperts beside x.
CHOSEN, SHARES, GATE_UP, DOWN, EXPERTS_RESIDUAL = range(1, 6)

_META = "packed"


def weight_value(*parts: StoredMatrix, gated: bool = False) -> ir.Value:
    """A weight that is still to be packed."""
    name = "+".join(f"{part.codes.name}" for part in parts)
    value = ir.Value(name=f"{name}/packed", type=ir.TensorType(ir.DataType.UINT8))
    value.meta[_META] = PackedWeight(parts, gated)
    return value


def stacked_value(experts: Sequence[Sequence[StoredMatrix]], name: str, gated: bool = False) -> ir.Value:
    """A weight of all experts that is still to be packed.

    Args:
        experts: The matrix of each expert, or its two where they are gated.
        name: Of what they are packed from.
        gated: As of `PackedWeight`.
    """
    value = ir.Value(name=f"{name}/packed", type=ir.TensorType(ir.DataType.UINT8))
    value.meta[_META] = StackedWeight(tuple(PackedWeight(tuple(parts), gated) for parts in experts))
    return value


def packed_weight(value: ir.Value | None) -> PackedWeight | None:
    """What a value will hold, if it is the weight of one product."""
    found = content_of(value)
    return found if isinstance(found, PackedWeight) else None


def content_of(value: ir.Value | None) -> PackedWeight | StackedWeight | None:
    """What a value will hold, if it is a weight that is still to be packed."""
    found = None if value is None else value.meta.get(_META)
    return found if isinstance(found, PackedWeight | StackedWeight) else None


def weight_prefix(node: ir.Node, index: int) -> str:
    """What the names of attributes begin with that say how the weight at an input is packed."""
    return "down_" if node.op_type == EXPERTS and index == DOWN else ""


def linear(
    x: ir.Value, weight: ir.Value, bias: ir.Value | None, rounding: str, input_scale: float | None, name: str
) -> ir.Node:
    """A PackedLinear node without activation and residual; `rounding` is its attribute `input`."""
    content = packed_weight(weight)
    assert content is not None
    attributes = [
        ir.AttrInt64("in_features", content.in_features),
        ir.AttrInt64("out_features", content.out_features),
        ir.AttrString("input", rounding),
        ir.AttrString("gate", ""),
        ir.AttrString("activation", ""),
    ]
    if input_scale is not None:
        attributes.append(ir.AttrFloat32("input_scale", input_scale))
    return operator(LINEAR, [x, weight, bias, None], attributes, name)


def operator(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Sequence[ir.Attr],
    name: str,
    num_outputs: int = 1,
) -> ir.Node:
    """A node of the domain."""
    return ir.Node(DOMAIN, op_type, inputs, attributes, name=name, num_outputs=num_outputs)


def replace(graph: ir.Graph, old: ir.Value, node: ir.Node, output: int = 0) -> None:
    """Let a new node of the graph give what `old` was, name, type and shape included."""
    new = node.outputs[output]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    old.name = f"{old.name}/replaced"
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
