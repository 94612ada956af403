"""From the traced pieces of an encoder-decoder model to its three canonical graphs."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from kvgraph.export import contract as names
from kvgraph.export.assemble import IR_VERSION, GraphAssembler
from kvgraph.export.contract import ENCODE, Contract, GraphName, GraphSpec
from kvgraph.export.trace_encoder_decoder import TracedCrossDecoder, TracedEncoder
from kvgraph.export.weights_file import WeightLayout

Constants = Mapping[str, ir.TensorProtocol]


def assemble_encode(
    traced: TracedEncoder, contract: Contract, weights: WeightLayout, constants: Constants
) -> ir.Model:
    """The graph `encode`; arguments as for `kvgraph.export.assemble.assemble`."""
    spec = contract.graph(ENCODE)
    assembler = GraphAssembler(ENCODE, weights, constants, traced.parameter_names.__getitem__)
    inputs = {tensor.name: assembler.add_input(tensor) for tensor in spec.inputs}
    first = [inputs[names.INPUT_IDS], inputs[names.ENCODER_LENGTH]]
    first += [assembler.constant(name) for name in traced.constant_names]
    hidden, *tensors = assembler.instantiate(traced.prelude, "encoder", first)
    shared = dict(zip(traced.shared_names, tensors, strict=True))
    for layer, kind in enumerate(traced.layer_kinds):
        hidden.name = names.encoder_hidden_state(layer)
        taken = [shared[name] for name in traced.layer_shared[layer]]
        (hidden,) = assembler.instantiate(traced.layers[kind], f"encoder.layers.{layer}", [hidden, *taken])
    hidden.name = names.encoder_hidden_state(len(traced.layer_kinds))
    (states,) = assembler.instantiate(traced.norm, "encoder.norm", [hidden])
    outputs: dict[str, ir.Value] = {}
    for layer, shape in enumerate(traced.cross_shapes):
        outputs[names.cross_key(layer)], outputs[names.cross_value(layer)] = assembler.instantiate(
            traced.cross[shape], f"cross.{layer}", [states]
        )
    return _finish(assembler, spec, outputs)


def assemble_cross_decoder(
    traced: TracedCrossDecoder,
    graph: GraphName,
    contract: Contract,
    weights: WeightLayout,
    constants: Constants,
) -> ir.Model:
    """The graph `prefill` or `decode`; arguments as for `kvgraph.export.assemble.assemble`."""
    spec = contract.graph(graph)
    assembler = GraphAssembler(graph, weights, constants, traced.parameter_names.__getitem__)
    inputs = {tensor.name: assembler.add_input(tensor) for tensor in spec.inputs}
    ids, past_length = inputs[names.INPUT_IDS], inputs[names.PAST_LENGTH]
    first = [ids, past_length, inputs[names.past_key(0)]]
    first += [assembler.constant(name) for name in traced.constant_names]
    hidden, *tensors = assembler.instantiate(traced.prelude, "prelude", first)
    shared = dict(zip(traced.shared_names, tensors, strict=True))
    source = [ids, inputs[names.ENCODER_LENGTH], inputs[names.cross_key(0)]]
    (shared["cross_mask"],) = assembler.instantiate(traced.cross_mask, "cross_mask", source)
    outputs: dict[str, ir.Value] = {}
    for layer, kind in enumerate(traced.layer_kinds):
        hidden.name = names.hidden_state(layer)
        keys_and_values = (
            names.past_key(layer),
            names.past_value(layer),
            names.cross_key(layer),
            names.cross_value(layer),
        )
        past = [inputs[name] for name in keys_and_values]
        taken = [shared[name] for name in traced.layer_shared[layer]]
        hidden, outputs[names.present_key(layer)], outputs[names.present_value(layer)] = (
            assembler.instantiate(
                traced.layers[kind], f"layers.{layer}", [hidden, past_length, *past, *taken]
            )
        )
    hidden.name = names.hidden_state(len(traced.layer_kinds))
    last = [hidden] + ([inputs[names.LOGIT_POSITIONS]] if graph == "prefill" else [])
    (outputs[names.LOGITS],) = assembler.instantiate(traced.head, "head", last)
    return _finish(assembler, spec, outputs)


def _finish(assembler: GraphAssembler, spec: GraphSpec, outputs: Mapping[str, ir.Value]) -> ir.Model:
    for tensor in spec.outputs:
        value = outputs[tensor.name]
        value.name, value.shape = tensor.name, ir.Shape(tensor.shape)
        assembler.graph.outputs.append(value)
    return ir.Model(assembler.graph, ir_version=IR_VERSION, producer_name="kvgraph")
