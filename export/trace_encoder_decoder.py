"""Tracing an encoder-decoder model: see `kvgraph.export.trace`, whose rules hold here, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch

from kvgraph.export import contract as names
from kvgraph.export.contract import GraphName
from kvgraph.export.trace import Argument, shape_of, torch_dtype_of, trace
from kvgraph.models.decoder import Prelude
from kvgraph.models.encoder_decoder import EncoderDecoder, SourcePrelude


@dataclass(frozen=True, slots=True)
class TracedEncoder:
    """The pieces of `encode`.

    Attributes:
        prelude: (input_ids, encoder_length, *constants) -> (hidden, *shared).
        constant_names: Of the prelude's.
        shared_names: Names of the prelude's outputs after the first.
        layers: Kind -> (hidden, *shared) -> (hidden,).
        layer_kinds: Kind of each layer.
        layer_shared: Which of `shared_names` each layer takes.
        norm: (hidden,) -> (states,).
        cross: (K, D) -> (states,) -> (key, value).
        cross_shapes: (K, D) of each of the decoder's layers.
        parameter_names: Module path -> name in graphs.
    """

    prelude: ir.Graph
    constant_names: tuple[str, ...]
    shared_names: tuple[str, ...]
    layers: Mapping[str, ir.Graph]
    layer_kinds: tuple[str, ...]
    layer_shared: tuple[tuple[str, ...], ...]
    norm: ir.Graph
    cross: Mapping[tuple[int, int], ir.Graph]
    cross_shapes: tuple[tuple[int, int], ...]
    parameter_names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TracedCrossDecoder:
    """The pieces of `prefill` or `decode`.

    Attributes:
        prelude: (input_ids, past_length, past_key, *constants) -> (hidden, *shared).
        constant_names: Of the prelude's.
        shared_names: Names of the prelude's outputs after the first.
        cross_mask: (input_ids, encoder_length, cross_key) -> (mask,).
        layers: Kind -> (hidden, past_length, past_key, past_value, cross_key, cross_value, *shared) ->
            (hidden, key, value).
        layer_kinds: Kind of each layer.
        layer_shared: Which of `shared_names` and "cross_mask" each layer takes.
        head: (hidden[, logit_positions]) -> (logits,).
        parameter_names: Module path -> name in graphs.
    """

    prelude: ir.Graph
    constant_names: tuple[str, ...]
    shared_names: tuple[str, ...]
    cross_mask: ir.Graph
    layers: Mapping[str, ir.Graph]
    layer_kinds: tuple[str, ...]
    layer_shared: tuple[tuple[str, ...], ...]
    head: ir.Graph
    parameter_names: Mapping[str, str]


def trace_encode(model: EncoderDecoder) -> TracedEncoder:
    """Trace the encoder's prelude, one layer of each kind, its norm, and a projection of each shape."""
    encoder, precision, size = model.encoder, model.precision, model.config.hidden_size
    stream = (names.BATCH, names.SOURCE_TOKENS, size)
    hidden = Argument("hidden_states", precision.residual, stream)
    states = Argument("states", precision.compute, stream)
    source = Argument(names.INPUT_IDS, torch.int64, (names.BATCH, names.SOURCE_TOKENS))
    prelude = trace(SourcePrelude(encoder.prelude), [source, _lengths(), *_constants(encoder.prelude)])
    shared = _shared(encoder.prelude, prelude)
    layers: dict[str, ir.Graph] = {}
    for layer, kind, taken in zip(encoder.layers, encoder.layer_kinds, encoder.layer_shared, strict=True):
        if kind not in layers:
            layers[kind] = trace(layer, [hidden, *(shared[name] for name in taken)])
    cross: dict[tuple[int, int], ir.Graph] = {}
    for projection, shape in zip(model.cross, model.cross_shapes, strict=True):
        if shape not in cross:
            cross[shape] = trace(projection, [states])
    return TracedEncoder(
        prelude=prelude,
        constant_names=tuple(encoder.prelude.constants),
        shared_names=encoder.prelude.shared_names,
        layers=layers,
        layer_kinds=encoder.layer_kinds,
        layer_shared=encoder.layer_shared,
        norm=trace(encoder.norm, [hidden]),
        cross=cross,
        cross_shapes=model.cross_shapes,
        parameter_names=model.names(),
    )


def trace_cross_decoder(model: EncoderDecoder, graph: GraphName) -> TracedCrossDecoder:
    """Trace the decoder's prelude, the mask of the source, one layer of each kind, and the head."""
    new_tokens: str | int = names.NEW_TOKENS if graph == "prefill" else 1
    ids = Argument(names.INPUT_IDS, torch.int64, (names.BATCH, new_tokens))
    past_length = Argument(names.PAST_LENGTH, torch.int64, (names.BATCH,))
    prelude = trace(
        model.prelude, [ids, past_length, _buffer(model, 0, "past_key"), *_constants(model.prelude)]
    )
    cross_mask = trace(model.cross_mask, [ids, _lengths(), _cross(model, 0, "cross_key")])
    shared = _shared(model.prelude, prelude)
    (mask,) = cross_mask.outputs
    shared["cross_mask"] = Argument("cross_mask", torch_dtype_of(mask), shape_of(mask))
    hidden = Argument(
        "hidden_states", model.precision.residual, (names.BATCH, new_tokens, model.config.hidden_size)
    )
    layers: dict[str, ir.Graph] = {}
    for index, kind in enumerate(model.layer_kinds):
        if kind not in layers:
            buffers = [_buffer(model, index, "past_key"), _buffer(model, index, "past_value")]
            buffers += [_cross(model, index, "cross_key"), _cross(model, index, "cross_value")]
            taken = [shared[name] for name in model.layer_shared[index]]
            layers[kind] = trace(model.layers[index], [hidden, past_length, *buffers, *taken])
    rows = [Argument(names.LOGIT_POSITIONS, torch.int64, (names.BATCH, names.LOGIT_ROWS))]
    return TracedCrossDecoder(
        prelude=prelude,
        constant_names=tuple(model.prelude.constants),
        shared_names=model.prelude.shared_names,
        cross_mask=cross_mask,
        layers=layers,
        layer_kinds=model.layer_kinds,
        layer_shared=model.layer_shared,
        head=trace(model.head, [hidden, *(rows if graph == "prefill" else [])]),
        parameter_names=model.names(),
    )


def _lengths() -> Argument:
    return Argument(names.ENCODER_LENGTH, torch.int64, (names.BATCH,))


def _constants(prelude: Prelude) -> list[Argument]:
    return [
        Argument(name, value.dtype, tuple(value.shape), True) for name, value in prelude.constants.items()
    ]


def _shared(prelude: Prelude, traced: ir.Graph) -> dict[str, Argument]:
    """What a prelude gives to layers, as their inputs."""
    outputs: Sequence[ir.Value] = traced.outputs[1:]
    return {
        name: Argument(name, torch_dtype_of(value), shape_of(value))
        for name, value in zip(prelude.shared_names, outputs, strict=True)
    }


def _buffer(model: EncoderDecoder, layer: int, name: str) -> Argument:
    heads, head_dim = model.kv_shapes[layer]
    return Argument(name, model.precision.compute, (names.BATCH, heads, names.CAPACITY, head_dim))


def _cross(model: EncoderDecoder, layer: int, name: str) -> Argument:
    heads, head_dim = model.cross_shapes[layer]
    return Argument(name, model.precision.compute, (names.BATCH, heads, names.SOURCE_TOKENS, head_dim))
