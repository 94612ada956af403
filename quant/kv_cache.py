"""INT8 and FP8 caches: from the scatter form of the graph contract to its delta form.

Neither runtime scatters 8-bit values, so the graph no longer writes the buffer. It takes the past as codes
[B, K, T, D], rounds the new keys and values, returns their codes [B, K, S, D] for the runtime to write at
`past_length`, and attends to both: the new ones rounded already, as they will be when they are read again.

| granularity | scales | applied by |
|---|---|---|
| tensor | [] | `QuantizeLinear` and `DequantizeLinear` |
| head | [K] | the same, along axis 1 |
| channel | [K, D] | division of the new entries; multiplication of the queries (keys) or of what is attended (values) |

By channel, codes stand for themselves and nothing is multiplied over the length of the cache. What is subtracted from
every key is not added again: it would add the same to all scores of a query. Where something other than plain
`Attention` reads the cache, scales and offsets are applied to all of it; so they are to keys that are kept without
their rotary embedding, before they get it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.contract import Contract, StateTensor
from kvgraph.export.passes.constants import constant
from kvgraph.quant.formats import FORMATS, Floats
from kvgraph.quant.graph_ops import dequantized
from kvgraph.quant.key_positions import forget_capacity, place_keys
from kvgraph.quant.plan import CacheRange
from kvgraph.quant.quantized_weight import stored_scale
from kvgraph.quant.rotated_keys import CacheRotation, find_key_rotation, unrotated_keys
from kvgraph.quant.scheme import CacheScheme

# Format -> how the contract and onnx_ir spell it.
_STATE_TYPES = {"int8": "int8", "float8_e4m3fn": "float8e4m3fn"}
_ELEMENTS = {"int8": ir.DataType.INT8, "float8_e4m3fn": ir.DataType.FLOAT8E4M3FN}
_QUERY, _KEYS = 0, 1


def delta_contract(contract: Contract, scheme: CacheScheme) -> Contract:
    """The contract of graphs that `quantize_cache` has rewritten."""
    dtype = _STATE_TYPES[scheme.format]
    return replace(
        contract, state=tuple(replace(tensor, form="delta", dtype=dtype) for tensor in contract.state)
    )


def quantize_cache(
    model: ir.Model, contract: Contract, scheme: CacheScheme, ranges: Mapping[str, CacheRange]
) -> bool:
    """Rewrite a canonical graph for an 8-bit cache in delta form.

    Rules:
        * `TensorScatter` of a state tensor becomes Q/DQ of the new entries, and `Concat` behind the dequantized past.
        * Masks compare positions with those of all keys, past and new, see `place_keys`.

    Args:
        model: A graph with its state in scatter form; its weights may be quantized.
        contract: What it promises.
        scheme: Format and granularity.
        ranges: State tensor -> offset and scale.

    Raises:
        ValueError: The graph reads or writes its cache in a way that has no delta form.
    """
    place_keys(model.graph, contract)
    rotation = CacheRotation(model.graph, contract)
    for tensor in contract.state:
        _rewrite_state(model.graph, tensor, contract, scheme, ranges[tensor.name], rotation)
    return bool(contract.state)


@dataclass(frozen=True, slots=True)
class _Codec:
    """How values of one state tensor become codes and back.

    Attributes:
        graph: Where its constants are stored.
        name: Of the state tensor.
        form: Number format.
        dtype: Of the values.
        scale: [], [K] or [K, D].
        scale_dtype: Of the scale, where it is not one by channel.
        offset: [K, D].
    """

    graph: ir.Graph
    name: str
    form: str
    dtype: ir.DataType
    scale: Floats
    scale_dtype: ir.DataType
    offset: Floats

    @property
    def by_channel(self) -> bool:
        """Whether codes are in units of their channel's scale."""
        return self.scale.ndim == 2

    def multiply(self, tape: Tape, value: ir.Value, name: str) -> ir.Value:
        """A value [B, heads, ..., D] times the channels' scales; query heads have those of the head that they read."""
        assert value.shape is not None
        heads = value.shape[1]
        assert isinstance(heads, int)
        repeated = np.repeat(self.scale, heads // len(self.scale), axis=0)
        return _op(tape, "Mul", value, self._constant(f"scale.{heads}", repeated), f"{self.name}/{name}")

    def quantize(self, tape: Tape, value: ir.Value) -> ir.Value:
        """Codes of values [B, K, S, D]; out of range they saturate."""
        if self.offset.any():
            value = _op(tape, "Sub", value, self._constant("offset", self.offset), f"{self.name}/centred")
        if self.by_channel:
            name = f"scale.{len(self.scale)}"
            value = _op(tape, "Div", value, self._constant(name, self.scale), f"{self.name}/scaled")
        saturate = {} if FORMATS[self.form].integer else {"saturate": 1}
        name = f"{self.name}/new_codes"
        codes = tape.op("QuantizeLinear", [value, *self._operands()], {**self._axis(), **saturate}, name=name)
        codes.name, codes.type, codes.shape = name, ir.TensorType(_ELEMENTS[self.form]), value.shape
        return codes

    def dequantize(self, tape: Tape, codes: ir.Value, name: str) -> ir.Value:
        """Values of codes [B, K, ..., D], but for what is applied elsewhere."""
        name = f"{self.name}/{name}"
        result = dequantized(tape, [codes, *self._operands()], name, self._axis(), self.dtype)
        result.type, result.shape = ir.TensorType(self.dtype), codes.shape
        return result

    def restore(self, tape: Tape, values: ir.Value, name: str) -> ir.Value:
        """What `dequantize` left out."""
        if self.by_channel:
            values = self.multiply(tape, values, f"{name}/scaled")
        if self.offset.any():
            values = _op(
                tape, "Add", values, self._constant("offset", self.offset), f"{self.name}/{name}/shifted"
            )
        return values

    def _constant(self, name: str, per_channel: Floats) -> ir.Value:
        return constant(self.graph, f"{self.name}/{name}", per_channel[None, :, None], self.dtype)

    def _axis(self) -> dict[str, int]:
        return {"axis": 1} if self.scale.ndim == 1 else {}

    def _operands(self) -> tuple[ir.Value, ir.Value]:
        """Scale and zero point of Q/DQ."""
        scale = np.ones((), np.float32) if self.by_channel else self.scale
        zero_point = np.zeros(scale.shape, FORMATS[self.form].element)
        name = f"{self.dtype.name.lower()}.1" if self.by_channel else f"{self.name}/scale"
        return (
            constant(self.graph, name, scale, self.dtype if self.by_channel else self.scale_dtype),
            constant(self.graph, ".".join([self.form, "0", *map(str, scale.shape)]), zero_point),
        )


def _rewrite_state(
    graph: ir.Graph,
    tensor: StateTensor,
    contract: Contract,
    scheme: CacheScheme,
    span: CacheRange,
    rotation: CacheRotation,
) -> None:
    past = next(value for value in graph.inputs if value.name == tensor.name)
    index, present = next(pair for pair in enumerate(graph.outputs) if pair[1].name == tensor.output)
    scatter = present.producer()
    others = [use.node for use in past.uses() if use.node.op_type != "Shape"]
    if scatter is None or scatter.op_type != "TensorScatter" or others != [scatter]:
        raise ValueError(
            f"{graph.name}: {tensor.output!r} is not written by one TensorScatter that alone reads {tensor.name!r}; "
            "this graph's cache has no 8-bit form, leave kv_cache out"
        )
    update, turn = scatter.inputs[1], find_key_rotation(present) if span.unrotated else None
    assert update is not None
    assert past.dtype is not None
    entries = update if turn is None else unrotated_keys(turn)
    codec = _codec(graph, tensor, scheme, span, entries)
    readers = [(use.node, use.idx) for use in present.uses()]
    tape = Tape()
    codes = codec.quantize(tape, entries)
    past.type = codes.type
    old, new = codec.dequantize(tape, past, "past"), codec.dequantize(tape, codes, "new")
    whole = _named(tape.op("Concat", [old, new], {"axis": 2}), f"{tensor.name}/whole", old)
    if turn is not None:
        restored = codec.restore(tape, whole, "whole")
        turned = rotation.rotate(tape, turn, restored, f"{tensor.name}/turned")
        if turned.dtype != update.dtype:
            turned = _named(tape.op("Cast", [turned], {"to": update.dtype}), f"{tensor.name}/cast", update)
    forget_capacity(whole, contract)
    graph.insert_before(scatter, tape.nodes)
    for node, position in readers:
        if turn is None:
            _connect(graph, codec, node, position, whole)
        else:
            node.replace_input_with(position, turned)
    present.name, codes.name = f"{tensor.output}/unused", tensor.output
    graph.outputs[index] = codes
    graph.remove(scatter, safe=True)
    _remove_unread(graph, update)


def _codec(
    graph: ir.Graph, tensor: StateTensor, scheme: CacheScheme, span: CacheRange, entries: ir.Value
) -> _Codec:
    """How these new entries [B, K, S, D] become codes."""
    assert entries.dtype is not None
    scale_dtype = ir.DataType.FLOAT if scheme.scale_form == "float32" else entries.dtype
    scale = stored_scale(span.scale, scale_dtype.numpy())
    return _Codec(graph, tensor.name, scheme.format, entries.dtype, scale, scale_dtype, span.offset)


def _remove_unread(graph: ir.Graph, value: ir.Value) -> None:
    """Remove what made a value that nothing reads any more."""
    node: ir.Node | None = value.producer()
    while node is not None and not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
        source = node.inputs[0]
        graph.remove(node, safe=True)
        node = None if source is None else source.producer()


def _connect(graph: ir.Graph, codec: _Codec, node: ir.Node, position: int, whole: ir.Value) -> None:
    """Let a node read past and new values, and put what remains to be done to them where it costs least."""
    tape = Tape()
    softcap = node.attributes.get("softcap")
    plain = node.op_type == "Attention" and (softcap is None or softcap.as_float() == 0)
    if not plain:
        restored = codec.restore(tape, whole, node.name or node.op_type)
        graph.insert_before(node, tape.nodes)
        node.replace_input_with(position, restored)
        return
    node.replace_input_with(position, whole)
    if not codec.by_channel:
        return
    if position == _KEYS:
        query = node.inputs[_QUERY]
        assert query is not None
        node.replace_input_with(_QUERY, codec.multiply(tape, query, "query"))
        graph.insert_before(node, tape.nodes)
    else:
        attended = node.outputs[0]
        readers = [(use.node, use.idx) for use in attended.uses()]
        scaled = codec.multiply(tape, attended, "attended")
        for reader, index in readers:
            reader.replace_input_with(index, scaled)
        graph.insert_after(node, tape.nodes)


def _op(tape: Tape, op_type: str, value: ir.Value, other: ir.Value, name: str) -> ir.Value:
    """A new value of the type and shape of another."""
    return _named(tape.op(op_type, [value, other], name=name), name, value)


def _named(result: ir.Value, name: str, like: ir.Value) -> ir.Value:
    """A new value with the type and shape of another, and its node, with a name."""
    node = result.producer()
    assert node is not None
    result.name, result.type, result.shape = name, like.type, like.shape
    node.name = node.name or name
    return result
