"""From traced pieces to the two canonical graphs: layers are instantiated, names are those of the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from kvgraph.export import contract as names
from kvgraph.export.contract import Contract, GraphName, TensorSpec
from kvgraph.export.passes.constants import ir_dtype
from kvgraph.export.trace import TracedDecoder
from kvgraph.export.translate import OPSET
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightLayout
from kvgraph.models.decoder import graph_name

# What the ONNX checker and every runtime of the contract read; opset 24 goes with IR version 11 or newer.
IR_VERSION = 11


class GraphAssembler:
    """A graph that grows by copies of traced pieces."""

    def __init__(
        self,
        spec_name: str,
        weights: WeightLayout,
        constants: Mapping[str, ir.TensorProtocol],
        parameter_name: Callable[[str], str] = graph_name,
    ) -> None:
        """Build a graph called `spec_name`; `parameter_name` gives a module path its name in `weights`."""
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name=spec_name)
        self.weights = weights
        self.constants = constants
        self.parameter_name = parameter_name
        # Constants of a piece -> their one copy in the graph, however often the piece is instantiated.
        self._shared: dict[ir.Value, ir.Value] = {}

    def add_input(self, spec: TensorSpec) -> ir.Value:
        """A new graph input."""
        value = ir.Value(name=spec.name, shape=ir.Shape(spec.shape), type=ir.TensorType(ir_dtype(spec.dtype)))
        self.graph.inputs.append(value)
        return value

    def constant(self, name: str) -> ir.Value:
        """A small tensor stored in the graph itself."""
        return self._initializer(name, self.constants[name])

    def weight(self, name: str) -> ir.Value:
        """A tensor of the weights file."""
        stored = self.weights.tensors[name]
        tensor = ir.ExternalTensor(
            WEIGHTS_FILE,
            stored.offset,
            stored.size,
            ir_dtype(stored.dtype),
            shape=ir.Shape(stored.shape),
            name=name,
        )
        return self._initializer(name, tensor)

    def _initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        if name in self.graph.initializers:
            return self.graph.initializers[name]
        shape = ir.Shape([dim for dim in tensor.shape if isinstance(dim, int)])
        value = ir.Value(
            name=name,
            shape=shape,
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def instantiate(self, piece: ir.Graph, prefix: str, inputs: Sequence[ir.Value]) -> list[ir.Value]:
        """Copy a traced piece into the graph.

        Args:
            piece: What to copy; left as it is.
            prefix: The piece's place in the decoder, "layers.3"; put before the names of its nodes and values.
            inputs: Values that take the place of the piece's inputs.

        Returns:
            The values that take the place of the piece's outputs.
        """
        values: dict[ir.Value, ir.Value] = dict(zip(piece.inputs, inputs, strict=True))
        for name, initializer in piece.initializers.items():
            if initializer.const_value is None:
                values[initializer] = self.weight(
                    self.parameter_name(f"{prefix}.{name.removeprefix('traced.')}")
                )
            else:
                if initializer not in self._shared:
                    shared = self._initializer(f"{prefix}/{name}", initializer.const_value)
                    self._shared[initializer] = shared
                values[initializer] = self._shared[initializer]
        for node in piece:
            copy = ir.Node(
                node.domain,
                node.op_type,
                [None if value is None else values[value] for value in node.inputs],
                list(node.attributes.values()),
                num_outputs=_used_outputs(node),
                name=f"{prefix}/{node.name}",
            )
            for old, new in zip(node.outputs, copy.outputs, strict=False):
                new.name, new.shape, new.type = f"{prefix}/{old.name}", old.shape, old.type
                values[old] = new
            self.graph.append(copy)
        return [values[value] for value in piece.outputs]


def _used_outputs(node: ir.Node) -> int:
    """Outputs up to the last that anything reads: optional ones behind it are not asked for."""
    used = [index for index, value in enumerate(node.outputs) if value.uses() or value.is_graph_output()]
    return max(used, default=0) + 1


def assemble(
    traced: TracedDecoder,
    graph: GraphName,
    contract: Contract,
    weights: WeightLayout,
    constants: Mapping[str, ir.TensorProtocol],
) -> ir.Model:
    """One canonical graph.

    Args:
        traced: The pieces, traced for this graph.
        graph: Which one it is.
        contract: Names, types and shapes of inputs and outputs.
        weights: Where every parameter lies.
        constants: Prelude argument -> its value, stored in the graph.
    """
    spec = contract.graph(graph)
    assembler = GraphAssembler(graph, weights, constants)
    inputs = {tensor.name: assembler.add_input(tensor) for tensor in spec.inputs}
    first = [inputs[names.INPUT_IDS], inputs[names.PAST_LENGTH], inputs[names.past_key(0)]]
    first += [assembler.constant(name) for name in constants]
    if contract.takes_new_length:
        first.append(inputs[names.NEW_LENGTH])
    hidden, *tensors = assembler.instantiate(traced.prelude, "prelude", first)
    shared = dict(zip(traced.shared_names, tensors, strict=True))
    outputs: dict[str, ir.Value] = {}
    for layer, kind in enumerate(traced.layer_kinds):
        hidden.name = names.hidden_state(layer)
        past = [inputs[names.past_key(layer)], inputs[names.past_value(layer)]]
        taken = [shared[name] for name in traced.layer_shared[layer]]
        hidden, outputs[names.present_key(layer)], outputs[names.present_value(layer)] = (
            assembler.instantiate(
                traced.layers[kind], f"layers.{layer}", [hidden, inputs[names.PAST_LENGTH], *past, *taken]
            )
        )
    hidden.name = names.hidden_state(len(traced.layer_kinds))
    last = [hidden] + ([inputs[names.LOGIT_POSITIONS]] if graph == "prefill" else [])
    (outputs[names.LOGITS],) = assembler.instantiate(traced.head, "head", last)
    for tensor in spec.outputs:
        value = outputs[tensor.name]
        value.name, value.shape = tensor.name, ir.Shape(tensor.shape)
        assembler.graph.outputs.append(value)
    return ir.Model(assembler.graph, ir_version=IR_VERSION, producer_name="kvgraph")
