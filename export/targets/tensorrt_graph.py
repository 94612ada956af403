"""A canonical graph in the form that TensorRT builds. All of it happens in memory: the bundle's files stay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from kvgraph.export.contract import CONTEXT_LENGTH, ENCODE, Contract, GraphName, TensorSpec
from kvgraph.export.passes.bind_capacity import bind_capacity
from kvgraph.export.passes.lower_attention import lower_attention
from kvgraph.export.passes.lower_dequantize import lower_dequantize
from kvgraph.export.passes.slice_cache import slice_cache


@dataclass(frozen=True, slots=True)
class TensorRTGraph:
    """What the parser is given.

    Attributes:
        path: The canonical file: its folder holds the external data, its name stands in messages.
        model: The lowered graph, serialized; weights stay external.
        inputs: Expected inputs, the contract's and perhaps `context_length`.
        outputs: Expected outputs.
        operators: Node name -> operator, to name the node in a message.
    """

    path: Path
    model: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    operators: dict[str, str]


def lower_for_tensorrt(path: Path, graph: GraphName, contract: Contract, capacity: int) -> TensorRTGraph:
    """Slice the cache to the context in use, write out what has no kernel, bind the capacity.

    Args:
        path: A canonical graph.
        graph: Which one it is.
        contract: The bundle's.
        capacity: T.

    Raises:
        ValueError: The graph has a form that TensorRT would reject or misread.
    """
    model = ir.load(path)
    spec = bound_contract(contract, capacity).graph(graph)
    _drop_other_outputs(model, {tensor.name for tensor in spec.outputs})
    # The encoder has no cache.
    sliced = graph != ENCODE and slice_cache(model, contract)
    lower_attention(model)
    lower_dequantize(model)
    if graph != ENCODE:
        bind_capacity(model, contract, capacity)
    context = (TensorSpec(CONTEXT_LENGTH, "int64", (1,)),) if sliced else ()
    operators = {node.name: node.op_type for node in model.graph if node.name}
    data = ir.to_proto(model).SerializeToString()
    return TensorRTGraph(path, data, (*spec.inputs, *context), spec.outputs, operators)


def _drop_other_outputs(model: ir.Model, names: set[str]) -> None:
    """Leave out the residual stream that `--debug-outputs` exposes: an engine fuses it away."""
    outputs = model.graph.outputs
    outputs[:] = [value for value in outputs if value.name in names]


def bound_contract(contract: Contract, capacity: int, max_source: int | None = None) -> Contract:
    """The contract with T as a number in every state tensor, and sources of at most `max_source` tokens."""
    state = tuple(
        replace(tensor, shape=(tensor.shape[0], tensor.shape[1], capacity, tensor.shape[3]))
        for tensor in contract.state
    )
    encoder = contract.encoder
    if encoder is not None and max_source is not None:
        encoder = replace(encoder, max_positions=max_source)
    return replace(contract, state=state, encoder=encoder)
