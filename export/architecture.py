"""What exporting does its own way for a decoder and for an encoder-decoder model."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from torch import Tensor

from kvgraph.export.assemble import assemble
from kvgraph.export.assemble_encoder_decoder import assemble_cross_decoder, assemble_encode
from kvgraph.export.contract import ENCODE, Contract, EncoderContract, GraphName, cross_tensors
from kvgraph.export.decoder_contract import decoder_contract
from kvgraph.export.trace import TracedDecoder, trace_decoder
from kvgraph.export.trace_encoder_decoder import (
    TracedCrossDecoder,
    TracedEncoder,
    trace_cross_decoder,
    trace_encode,
)
from kvgraph.export.weights_file import WeightLayout
from kvgraph.models.decoder import Decoder
from kvgraph.models.encoder_decoder import EncoderDecoder, Model

TracedGraph = TracedDecoder | TracedEncoder | TracedCrossDecoder


def trace_graph(model: Model, graph: GraphName) -> TracedGraph:
    """The traced pieces of one graph of a model from `fake_model`."""
    if isinstance(model, Decoder):
        return trace_decoder(model, graph)
    return trace_encode(model) if graph == ENCODE else trace_cross_decoder(model, graph)


def assemble_graph(
    traced: TracedGraph,
    graph: GraphName,
    contract: Contract,
    weights: WeightLayout,
    constants: Mapping[str, ir.TensorProtocol],
) -> ir.Model:
    """One canonical graph from its pieces, see `kvgraph.export.assemble.assemble`."""
    if isinstance(traced, TracedDecoder):
        return assemble(traced, graph, contract, weights, constants)
    if isinstance(traced, TracedEncoder):
        return assemble_encode(traced, contract, weights, constants)
    return assemble_cross_decoder(traced, graph, contract, weights, constants)


def model_contract(model: Model, capacity: int | None = None) -> Contract:
    """The contract that a model's graphs will keep, with T as a number where `capacity` is one."""
    encoder = encoder_contract(model) if isinstance(model, EncoderDecoder) else None
    return decoder_contract(model, capacity, encoder)


def encoder_contract(model: EncoderDecoder) -> EncoderContract:
    """Vocabulary, positions and cross tensors of the encoder."""
    config, dtype = model.config, str(model.precision.compute).removeprefix("torch.")
    cross = cross_tensors(model.cross_shapes, dtype)
    return EncoderContract(config.source_vocab_size, config.max_source_positions, cross)


def graph_constants(model: Model) -> Mapping[str, Tensor]:
    """What the config determines and a trace takes as inputs; to be asked outside of fake tensors."""
    if isinstance(model, Decoder):
        return model.prelude.constants
    return {**model.encoder.prelude.constants, **model.prelude.constants}
