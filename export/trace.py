"""Tracing: each piece of a decoder becomes one small ONNX graph.

Pieces are traced under fake tensors, with every symbolic dimension at a size of two or more (the tracer freezes 0 and
1) and distinct sizes, so that two dimensions that differ in meaning are never taken for one.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgraph.export import contract as names
from kvgraph.export.contract import GraphName
from kvgraph.export.passes.canonicalize import canonicalize
from kvgraph.export.registry import one_registry
from kvgraph.export.translate import OPSET, translation_table
from kvgraph.models.config import ModelConfig
from kvgraph.models.decoder import Decoder
from kvgraph.models.encoder_decoder import Model
from kvgraph.models.family import family
from kvgraph.models.layers import Precision

# Traced sizes of the symbolic dimensions; any distinct numbers >= 2 that no real dimension is derived from.
_SIZES = {
    names.BATCH: 3,
    names.NEW_TOKENS: 5,
    names.LOGIT_ROWS: 4,
    names.CAPACITY: 37,
    names.SOURCE_TOKENS: 23,
}

Shape = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Argument:
    """An input of a piece: name, dtype, shape with letters for symbolic dimensions, and how it is passed."""

    name: str
    dtype: torch.dtype
    shape: Shape
    keyword: bool = False


@dataclass(frozen=True, slots=True)
class TracedDecoder:
    """The pieces of one graph.

    Attributes:
        prelude: (input_ids, past_length, past_key, *constants[, new_length]) -> (hidden, *shared).
        shared_names: Names of the prelude's outputs after the first.
        layers: Kind -> (hidden, past_length, past_key, past_value, *shared) -> (hidden, key, value).
        layer_kinds: Kind of each layer.
        layer_shared: Which of `shared_names` each layer takes.
        head: (hidden[, logit_positions]) -> (logits,).
    """

    prelude: ir.Graph
    shared_names: tuple[str, ...]
    layers: Mapping[str, ir.Graph]
    layer_kinds: tuple[str, ...]
    layer_shared: tuple[tuple[str, ...], ...]
    head: ir.Graph


@contextmanager
def fake_model(config: ModelConfig, precision: Precision) -> Iterator[Model]:
    """The module with parameters that have shapes and types and no data; trace it inside the `with` block."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield family(config.model_type).build(config, precision)


def trace_decoder(decoder: Decoder, graph: GraphName) -> TracedDecoder:
    """Trace the prelude, one layer of each kind, and the head of a decoder from `fake_model`.

    Args:
        decoder: What to trace.
        graph: "decode" fixes S = 1 and asks for no `logit_positions`.
    """
    new_tokens: str | int = names.NEW_TOKENS if graph == "prefill" else 1
    stream_shape = (names.BATCH, new_tokens, decoder.config.hidden_size)
    hidden = Argument("hidden_states", decoder.precision.residual, stream_shape)
    past_length = Argument(names.PAST_LENGTH, torch.int64, (names.BATCH,))
    prelude = decoder.prelude
    arguments = [
        Argument(names.INPUT_IDS, torch.int64, (names.BATCH, new_tokens)),
        past_length,
        _buffer(decoder, 0, "past_key"),
        *(Argument(name, value.dtype, tuple(value.shape), True) for name, value in prelude.constants.items()),
    ]
    if prelude.takes_new_length:
        arguments.append(Argument(names.NEW_LENGTH, torch.int64, (names.BATCH,), True))
    traced_prelude = trace(prelude, arguments)
    shared = {
        name: Argument(name, torch_dtype_of(value), shape_of(value))
        for name, value in zip(prelude.shared_names, traced_prelude.outputs[1:], strict=True)
    }
    layers = {}
    for index, kind in enumerate(decoder.layer_kinds):
        if kind not in layers:
            buffers = [_buffer(decoder, index, "past_key"), _buffer(decoder, index, "past_value")]
            taken = [shared[name] for name in decoder.layer_shared[index]]
            layers[kind] = trace(decoder.layers[index], [hidden, past_length, *buffers, *taken])
    rows = [Argument(names.LOGIT_POSITIONS, torch.int64, (names.BATCH, names.LOGIT_ROWS))]
    head = trace(decoder.head, [hidden, *(rows if graph == "prefill" else [])])
    return TracedDecoder(
        traced_prelude, prelude.shared_names, layers, decoder.layer_kinds, decoder.layer_shared, head
    )


def trace(module: nn.Module, arguments: Sequence[Argument]) -> ir.Graph:
    """One module as an ONNX graph whose symbolic dimensions carry the letters of `arguments`."""
    inputs = tuple(_empty(argument) for argument in arguments)
    dims = {letter: torch.export.Dim(letter, min=2) for letter in _SIZES}
    dynamic = tuple(
        {axis: dims[dim] for axis, dim in enumerate(argument.shape) if isinstance(dim, str)}
        for argument in arguments
    )
    with _quiet(), one_registry():
        program = torch.export.export(
            _Called(module, [argument.name for argument in arguments if argument.keyword]),
            inputs,
            dynamic_shapes={"arguments": dynamic},
            strict=False,
        )
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            custom_translation_table=translation_table(),
        )
    assert onnx_program is not None
    graph = onnx_program.model.graph
    _name_dimensions(graph, arguments)
    canonicalize(graph)
    return graph


class _Called(nn.Module):
    """A module under a signature of positional arguments alone, the last of which it takes by keyword."""

    def __init__(self, module: nn.Module, keywords: Sequence[str]) -> None:
        super().__init__()
        self.traced = module
        self.keywords = tuple(keywords)

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...] | Tensor:
        count = len(arguments) - len(self.keywords)
        keywords = dict(zip(self.keywords, arguments[count:], strict=True))
        result: tuple[Tensor, ...] | Tensor = self.traced(*arguments[:count], **keywords)
        return result


def _buffer(decoder: Decoder, layer: int, name: str) -> Argument:
    heads, head_dim = decoder.kv_shapes[layer]
    return Argument(name, decoder.precision.compute, (names.BATCH, heads, names.CAPACITY, head_dim))


def _empty(argument: Argument) -> Tensor:
    shape = [dim if isinstance(dim, int) else _SIZES[dim] for dim in argument.shape]
    return torch.empty(shape, dtype=argument.dtype)


def torch_dtype_of(value: ir.Value) -> torch.dtype:
    """The type of a traced value."""
    assert value.dtype is not None
    return ir.tensor_adapters.to_torch_dtype(value.dtype)


def shape_of(value: ir.Value) -> Shape:
    """The shape of a traced value, with letters; every dimension of an input or output is known."""
    assert value.shape is not None
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    assert all(dim is not None for dim in dims), f"{value.name}: {value.shape}"
    return tuple(dim for dim in dims if dim is not None)


def _name_dimensions(graph: ir.Graph, arguments: Sequence[Argument]) -> None:
    """Replace the tracer's symbols ("s27") by the contract's letters; forget dimensions that are expressions."""
    letters: dict[str | None, str] = {}
    for value, argument in zip(graph.inputs, arguments, strict=True):
        assert value.shape is not None
        for found, dim in zip(value.shape, argument.shape, strict=True):
            assert isinstance(found, ir.SymbolicDim) == isinstance(dim, str), (
                f"{argument.name}: {value.shape}"
            )
            if isinstance(found, ir.SymbolicDim) and isinstance(dim, str):
                letters[found.value] = dim
    for value in _values(graph):
        if value.shape is not None:
            value.shape = ir.Shape(
                [dim if isinstance(dim, int) else letters.get(dim.value) for dim in value.shape]
            )


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    for node in graph:
        yield from node.outputs


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's notes on packages that it looks for, and on its own internals, out of our output."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
