"""Attention over a cache that is written in place as one `CachedAttention`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.contract import PAST_LENGTH
from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.constants import constant
from kvgraph.export.passes.join_linears import can_join, join
from kvgraph.export.passes.match_cache import Cache, match_cache
from kvgraph.export.passes.match_mask import match_window
from kvgraph.export.passes.matching import (
    constant_values,
    float_attribute,
    int_attribute,
    made_by,
    sole_reader,
    static_dim,
)
from kvgraph.export.passes.slot_angles import are_angles_of_slots, slot_angles

_FLOAT = ir.TensorType(ir.DataType.FLOAT)


def fuse_cached_attention(model: ir.Model) -> bool:
    """Replace scatter, attention and what leads to them.

    Rules, all of which a layer must meet or it stays:
        * Query, key and value are [B, S, heads * D], reshaped to heads and transposed; query and key may then be
          RMS-normalised over D, and rotated, both by the same cosines and sines.
        * Key and value are written to their buffers at `past_length`, and nothing else reads the buffers; or they are
          kept as 8-bit codes in delta form, see `match_cache`. Codes then are written to the buffers, too.
        * The mask is causal, perhaps with a window, see `match_window`; the result is transposed back and flattened.
        * Three products of one input become one, where they are rounded alike; else they are concatenated.
    """
    changed = False
    for node in list(model.graph):
        layer = _match(node) if node.op_type == "Attention" and not node.domain else None
        if layer is not None:
            _fuse(model.graph, layer)
            changed = True
    return changed


@dataclass(frozen=True, slots=True)
class _Heads:
    """Query, key or value of a layer.

    Attributes:
        source: [B, S, heads * D].
        count: Heads.
        norm: The node that normalises each head.
        rotation: The node that rotates each head.
    """

    source: ir.Value
    count: int
    norm: ir.Node | None = None
    rotation: ir.Node | None = None


@dataclass(frozen=True, slots=True)
class _Layer:
    """An attention that can be fused."""

    attention: ir.Node
    query: _Heads
    key: _Heads
    value: _Heads
    caches: tuple[Cache, Cache]
    window: int
    result: ir.Value


def _match(attention: ir.Node) -> _Layer | None:
    if len(attention.inputs) < 4 or any(value is not None for value in attention.inputs[4:]):
        return None
    if int_attribute(attention, "is_causal", 0) or attention.attributes.get("softmax_precision") is not None:
        return None
    query, *operands, mask = attention.inputs[:4]
    key, value = (match_cache(operand, attention) for operand in operands)
    if key is None or value is None or len(attention.outputs) > 1 or value.turn is not None:
        return None
    window = match_window(mask, key.past)
    query = _unscaled(query, key)
    attended = _scaled(attention.outputs[0], value)
    capped = float_attribute(attention, "softcap", 0.0) != 0
    # What is the same for all scores of a query does not matter.
    if (
        not value.restored
        or not (key.restored or (key.turn is None and not capped))
        or key.past.dtype != value.past.dtype
    ):
        return None
    heads = (_heads(query), _turned(_heads(key.entries), key), _heads(value.entries))
    result = None if attended is None else _flattened(attended)
    if window is None or heads[0] is None or heads[1] is None or heads[2] is None or result is None:
        return None
    layer = _Layer(attention, heads[0], heads[1], heads[2], (key, value), window, result)
    return layer if _is_alike(layer) else None


def _unscaled(query: ir.Value | None, key: Cache) -> ir.Value | None:
    """Queries without what their keys' codes still have to be multiplied by; None where that is not there."""
    if key.outside is None:
        return query
    node = made_by(query, "Mul")
    return node.inputs[0] if node is not None and _repeats(node.inputs[1], key.outside) else None


def _scaled(attended: ir.Value, value: Cache) -> ir.Value | None:
    """What is attended, times what codes of values still have to be multiplied by; None where that is not there."""
    if value.outside is None:
        return attended
    node = sole_reader(attended)
    scales = node is not None and node.op_type == "Mul" and _repeats(node.inputs[1], value.outside)
    return node.outputs[0] if node is not None and scales else None


def _repeats(value: ir.Value | None, channels: NDArray[np.float32]) -> bool:
    """Whether a constant [1, H, 1, D] has [K, D] for every query head that reads one of the K."""
    found = constant_values(value)
    if found is None or found.ndim != 4 or found.shape[1] % len(channels):
        return False
    repeated = np.repeat(channels, found.shape[1] // len(channels), axis=0)
    return np.array_equal(found.astype(np.float32), repeated[None, :, None])


def _turned(heads: _Heads | None, key: Cache) -> _Heads | None:
    """The heads of keys with the embedding that the cache gets when it is read."""
    if heads is None or key.turn is None:
        return heads
    return replace(heads, rotation=key.turn) if heads.rotation is None else None


def _heads(value: ir.Value | None) -> _Heads | None:
    """What [B, heads, S, D] comes from, if it is a reshaped and transposed [B, S, heads * D]."""
    rotation = made_by(value, "RotaryEmbedding")
    if rotation is not None:
        value = rotation.inputs[0]
    norm = made_by(value, "RMSNormalization")
    if norm is not None:
        value = norm.inputs[0]
    transpose = made_by(value, "Transpose")
    if transpose is None or transpose.attributes["perm"].as_ints() != (0, 2, 1, 3):
        return None
    view = transpose.inputs[0]
    reshape = made_by(view, "Reshape")
    source = None if reshape is None else reshape.inputs[0]
    count, head_dim = static_dim(view, 2), static_dim(view, 3)
    if source is None or source.shape is None or len(source.shape) != 3 or count is None or head_dim is None:
        return None
    if static_dim(source, 2) != count * head_dim:
        return None
    return _Heads(source, count, norm, rotation)


def _flattened(value: ir.Value) -> ir.Value | None:
    """[B, S, H * D] of [B, H, S, D], if nothing else reads that."""
    transpose = sole_reader(value)
    if transpose is None or transpose.op_type != "Transpose":
        return None
    if transpose.attributes["perm"].as_ints() != (0, 2, 1, 3):
        return None
    reshape = sole_reader(transpose.outputs[0])
    if reshape is None or reshape.op_type != "Reshape":
        return None
    result, heads, head_dim = reshape.outputs[0], static_dim(value, 1), static_dim(value, 3)
    flat = result.shape is not None and len(result.shape) == 3 and heads is not None and head_dim is not None
    return result if flat and static_dim(result, 2) == (heads or 0) * (head_dim or 0) else None


def _is_alike(layer: _Layer) -> bool:
    """Whether query, key and value are treated in the one way that the operator has."""
    query, key, value = layer.query, layer.key, layer.value
    if value.norm is not None or value.rotation is not None or key.count != value.count:
        return False
    head_dim = _head_dim(layer)
    if (
        static_dim(key.source, 2) != key.count * head_dim
        or static_dim(value.source, 2) != value.count * head_dim
    ):
        return False
    if (query.rotation is None) != (key.rotation is None):
        return False
    if query.rotation is not None and key.rotation is not None:
        if len(query.rotation.inputs) != 3 or not _same_angles(query.rotation, key.rotation, layer.caches[0]):
            return False
        if any(_rotary(query.rotation, name) != _rotary(key.rotation, name) for name in _ROTARY):
            return False
    norms = [norm for norm in (query.norm, key.norm) if norm is not None]
    epsilons = {float_attribute(norm, "epsilon", 1e-5) for norm in norms}
    return len(epsilons) < 2 and all(_is_over_head(norm, head_dim) for norm in norms)


def _same_angles(query: ir.Node, key: ir.Node, cache: Cache) -> bool:
    """Whether keys turn as queries of their position do."""
    pairs = zip(key.inputs[1:], query.inputs[1:], strict=True)
    if key is cache.turn:
        return all(are_angles_of_slots(of_slots, new, cache.past) for of_slots, new in pairs)
    return all(one is other for one, other in pairs)


_ROTARY = ("interleaved", "rotary_embedding_dim", "num_heads")


def _rotary(node: ir.Node, name: str) -> int:
    return int_attribute(node, name, 0)


def _is_over_head(norm: ir.Node, head_dim: int) -> bool:
    weight = constant_values(norm.inputs[1])
    return weight is not None and weight.shape == (head_dim,) and int_attribute(norm, "axis", -1) in (-1, 3)


def _head_dim(layer: _Layer) -> int:
    width = static_dim(layer.query.source, 2)
    assert width is not None  # _heads has looked at it
    return width // layer.query.count


def _fuse(graph: ir.Graph, layer: _Layer) -> None:
    attention, query, key = layer.attention, layer.query, layer.key
    name = f"{attention.name}/cached"
    head_dim = _head_dim(layer)
    qkv = _joined(graph, layer, f"{name}/qkv")
    rotation = query.rotation
    cos, sin = (None, None) if rotation is None else rotation.inputs[1:3]
    rotary_dim = 0 if rotation is None else _rotary(rotation, "rotary_embedding_dim") or head_dim
    norms = [heads.norm for heads in (query, key)]
    norm = next((node for node in norms if node is not None), None)
    inputs = [
        qkv,
        next(value for value in graph.inputs if value.name == PAST_LENGTH),
        *(cache.past for cache in layer.caches),
        cos,
        sin,
        *(None if node is None else node.inputs[1] for node in norms),
        *_cache_inputs(graph, layer.caches),
    ]
    attributes = [
        ir.AttrInt64("num_heads", query.count),
        ir.AttrInt64("kv_num_heads", key.count),
        ir.AttrInt64("head_dim", head_dim),
        ir.AttrFloat32("scale", float_attribute(attention, "scale", head_dim**-0.5)),
        ir.AttrInt64("window", layer.window),
        ir.AttrInt64("rotary_dim", rotary_dim),
        ir.AttrInt64("interleaved", 0 if rotation is None else _rotary(rotation, "interleaved")),
        ir.AttrFloat32("softcap", float_attribute(attention, "softcap", 0.0)),
        ir.AttrFloat32("norm_epsilon", 0.0 if norm is None else float_attribute(norm, "epsilon", 1e-5)),
    ]
    fused = packed.operator(packed.ATTENTION, inputs, attributes, name, num_outputs=3)
    # The weights of both norms are known by now, the result's readers come later.
    graph.insert_after(attention, fused)
    packed.replace(graph, layer.result, fused)
    for index, cache in enumerate(layer.caches):
        packed.replace(graph, cache.present, fused, index + 1)
        fused.outputs[index + 1].shape = cache.past.shape


def _cache_inputs(graph: ir.Graph, caches: tuple[Cache, Cache]) -> list[ir.Value | None]:
    """The operator's inputs beside those that a float cache has."""
    key = caches[0]
    if key.scale is None:
        return []
    turned = [] if key.turn is None else key.turn.inputs[1:]
    angles: list[ir.Value | None] = [
        slot_angles(graph, angle, key.past) for angle in turned if angle is not None
    ]
    numbers = [
        constant(graph, f"{cache.past.name}/{name}.channels", content)
        for cache in caches
        for name, content in (("scale", cache.scale), ("offset", cache.offset))
        if content is not None
    ]
    return [*(angles or [None, None]), *numbers]


def _joined(graph: ir.Graph, layer: _Layer, name: str) -> ir.Value:
    """Query, key and value side by side, [B, S, (H + 2 K) * D]: of one product, or concatenated."""
    sources = [layer.query.source, layer.key.source, layer.value.source]
    products = [made_by(source, packed.LINEAR, packed.DOMAIN) for source in sources]
    linears = [product for product in products if product is not None]
    alone = all(sole_reader(source) is not None for source in sources)
    if len(linears) == 3 and alone and can_join(linears):
        node = join(graph, linears, name)
    else:
        node = ir.Node("", "Concat", sources, [ir.AttrInt64("axis", -1)], name=name, num_outputs=1)
    shape = sources[0].shape
    width = sum(static_dim(source, 2) or 0 for source in sources)
    value = node.outputs[0]
    value.name, value.type = name, _FLOAT
    value.shape = None if shape is None else ir.Shape([shape[0], shape[1], width])
    graph.insert_before(layer.attention, node)
    return value
