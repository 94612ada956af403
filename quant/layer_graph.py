"""A bundle's prefill graph cut into pieces that run alone: what comes before the layers, every layer, the head.

The cuts are where the residual stream has its fixed names. A piece computes in float32 whatever the bundle's type, and
its weights are inputs: the same piece runs with the bundle's weights, rescaled ones or rounded ones, and memory holds
one layer's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from kvgraph.export.contract import hidden_state, present_key, present_value
from kvgraph.quant.rotated_keys import find_key_rotation, unrotated_keys

PRELUDE, HEAD = "prelude", "head"
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOAT = ir.TensorType(ir.DataType.FLOAT)
_WEIGHT = ".weight"
EMBEDDING_TABLE = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with a stored weight.

    Attributes:
        module: "model.layers.0.mlp.up_proj".
        input: Name of the value that is multiplied, [..., I].
        transposed: Whether the weight is stored [O, I]: a head that is tied to the embedding table.
    """

    module: str
    input: str
    transposed: bool = False

    @property
    def weight(self) -> str:
        """Name of the stored tensor."""
        return self.module + _WEIGHT


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the prefill graph, ready to run.

    Attributes:
        name: "prelude", "layers.3" or "head".
        graph: Its nodes under their own names, in float32.
        stream: The residual stream that enters it; "" where it makes one.
        parameters: Stored tensors that it reads, which are inputs of `graph`.
        inputs: The other inputs: the stream, what layers share, inputs of the whole graph.
        outputs: The values that it was cut for, then whatever else was asked for.
        products: Its matrix products, in the graph's order.
        unrotated_keys: Which of the outputs are a layer's new keys before their rotary embedding, [B, K, S, D]; None
            where they have none that could be left for later.
    """

    name: str
    graph: ir.Graph
    stream: str
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    products: tuple[Product, ...]
    unrotated_keys: str | None = None

    @property
    def layer(self) -> int:
        """Number of the layer that it is."""
        return int(self.name.removeprefix("layers."))

    def product_inputs(self) -> dict[str, list[Product]]:
        """Products by the value that they multiply."""
        groups: dict[str, list[Product]] = {}
        for product in self.products:
            groups.setdefault(product.input, []).append(product)
        return groups

    def serialize(self) -> bytes:
        """The piece as an ONNX model."""
        model = ir.Model(self.graph, ir_version=11, producer_name="kvgraph")
        data: bytes = ir.to_proto(model).SerializeToString()
        return data


class LayeredGraph:
    """A prefill graph that gives out its pieces.

    Args:
        model: From a float bundle.
        stored: Names of the bundle's tensors.
        num_layers: Layers of the decoder.
    """

    def __init__(self, model: ir.Model, stored: Collection[str], num_layers: int) -> None:
        self._graph = model.graph
        self._stored = frozenset(stored)
        self.num_layers = num_layers
        self._values = ir.convenience.create_value_mapping(model.graph)
        self._nodes: dict[str, list[ir.Node]] = {}
        for node in model.graph:
            self._nodes.setdefault(_piece_of(node), []).append(node)
        layers = (name for name in self._nodes if name not in (PRELUDE, HEAD))
        needed = (value for name in layers for value in self._outside(name))
        streams = {hidden_state(layer) for layer in range(num_layers + 1)}
        shared = {value.name: None for value in needed if value.producer() is not None}
        # What the prelude gives to every layer: masks, angles.
        self.shared = tuple(name for name in shared if name is not None and name not in streams)

    def embedding(self) -> Piece:
        """Ids and positions to the stream that enters the first layer; takes any rows of the embedding table."""
        piece = self._cut(PRELUDE, (hidden_state(0),))
        for value in piece.graph.inputs:
            if value.name == EMBEDDING_TABLE and value.shape is not None:
                value.shape = ir.Shape([None, *value.shape[1:]])
        return piece

    def shared_values(self) -> Piece:
        """Positions to what layers share; of the ids it reads no more than their shape."""
        return self._cut(PRELUDE, self.shared)

    def layer(self, index: int) -> Piece:
        """A layer: stream and shared values to the next layer's stream and the layer's cache."""
        outputs: tuple[str, ...] = (hidden_state(index + 1), present_key(index), present_value(index))
        rotation = find_key_rotation(self._values[present_key(index)])
        keys = None if rotation is None else unrotated_keys(rotation).name
        if keys is not None:
            outputs += (keys,)
        piece = self._cut(f"layers.{index}", outputs, hidden_state(index), expose_products=True)
        return replace(piece, unrotated_keys=keys)

    def head(self, with_logits: bool = False) -> Piece:
        """The last stream to the input of the head's product, and to logits where they are asked for."""
        outputs = tuple(value.name or "" for value in self._graph.outputs[:1]) if with_logits else ()
        return self._cut(HEAD, outputs, hidden_state(self.num_layers), expose_products=not with_logits)

    def piece(self, index: int) -> Piece:
        """A layer or, at `num_layers`, the head."""
        return self.head() if index == self.num_layers else self.layer(index)

    def pieces_by_module(self) -> dict[str, int]:
        """Number of the piece that multiplies by each module's matrix, for those that are stored [I, O]."""
        numbers = {HEAD: self.num_layers, **{f"layers.{layer}": layer for layer in range(self.num_layers)}}
        return {
            product.module: numbers[name]
            for name, nodes in self._nodes.items()
            for product in _products(nodes, self._stored)
            if name in numbers and not product.transposed
        }

    def _outside(self, piece: str) -> list[ir.Value]:
        """What the nodes of a piece read and do not make, in order."""
        nodes = self._nodes[piece]
        own = {value for node in nodes for value in node.outputs}
        read = (value for node in nodes for value in node.inputs if value is not None)
        return list(dict.fromkeys(value for value in read if value not in own))

    def _cut(
        self, name: str, outputs: tuple[str, ...], stream: str = "", expose_products: bool = False
    ) -> Piece:
        products = _products(self._nodes[name], self._stored)
        if expose_products:
            outputs += tuple(dict.fromkeys(product.input for product in products))
        needed = [
            value for value in self._outside(name) if not value.is_initializer() or value.name in self._stored
        ]
        graph = ir.convenience.extract(self._graph, needed, list(dict.fromkeys(outputs)))
        read = {value.name for node in graph for value in node.inputs if value is not None}
        graph.inputs[:] = [value for value in graph.inputs if value.name in read]
        names = [value.name or "" for value in graph.inputs]
        for parameter in self._stored & graph.initializers.keys():
            del graph.initializers[parameter]
        _widen(graph)
        return Piece(
            name=name,
            graph=graph,
            stream=stream,
            parameters=tuple(name for name in names if name in self._stored),
            inputs=tuple(name for name in names if name not in self._stored),
            outputs=tuple(dict.fromkeys(outputs)),
            products=products,
        )


def _piece_of(node: ir.Node) -> str:
    """The assembler names every node by its piece: "layers.3/node_matmul"."""
    return (node.name or "").partition("/")[0]


def _products(nodes: Iterable[ir.Node], stored: Collection[str]) -> tuple[Product, ...]:
    """Products of an activation [..., I] with a stored matrix [I, O], or [O, I] where `Gemm` transposes it."""
    found = []
    for node in nodes:
        if node.op_type not in ("MatMul", "Gemm"):
            continue
        activation, weight = node.inputs[0], node.inputs[1]
        if activation is None or weight is None or weight.name not in stored or activation.name is None:
            continue
        # Experts, stacked [X, I, O], are rounded to nearest whatever the algorithm.
        if len(weight.shape or ()) != 2:
            continue
        transposed = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
        found.append(Product(str(weight.name).removesuffix(_WEIGHT), activation.name, transposed))
    return tuple(found)


def _widen(graph: ir.Graph) -> None:
    """Float32 in place of every half-precision type: values, constants, targets of casts."""
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.dtype in _HALF:
            value.type = _FLOAT
    for initializer in graph.initializers.values():
        if initializer.dtype in _HALF and initializer.const_value is not None:
            initializer.const_value = _widened(initializer.const_value)
            initializer.type = _FLOAT
    for node in graph:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _HALF:
                node.attributes[name] = ir.AttrTensor(name, _widened(attribute.as_tensor()))
            elif name in ("to", "softmax_precision") and attribute.as_int() in _HALF:
                node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT)


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)
