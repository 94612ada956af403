"""Where a layer lets factors pass from one weight to another, so that the function stays and rounding gets easier.

The inputs of a matrix product are multiplied by 1 / s, channel by channel, and the rows of its matrix by s. The first
costs no operator where whatever makes the inputs can take it up:

| the inputs come from | takes up 1 / s |
|---|---|
| a norm | its weight, and its bias |
| a product of two values, one of them a linear's output (`up_proj` of a gated MLP) | the linear's columns |
| ReLU of a linear's output | the linear's columns |
| attention | the value projection's columns; all query heads of a key/value head share their factors |

Nothing else may read the values on that way. Every family is served by what its graph shows; where none of this
applies, as behind GELU or where the residual stream itself is the input, the product keeps its inputs. So it does
where they are divided by a scale of their row (`kvgraph.models.layers.stream_product`): that would follow the factors,
and the quotients would leave the range that was calibrated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as Collection
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from kvgraph.quant.formats import Floats
from kvgraph.quant.layer_graph import Piece, Product
from kvgraph.quant.plan import Rescaling
from kvgraph.quant.tensor_writer import rescale


@dataclass(frozen=True, slots=True)
class Fold:
    """Products of one input whose factors something before them takes up.

    Attributes:
        input: The value that the products multiply.
        products: All of its readers.
        producers: Stored tensors that take up 1 / s along their last axis.
        groups: (K, G, D) where the factors of each of K heads with D channels serve G heads of the input, else None.
        through_cache: Whether 1 / s reaches the cache, which both graphs read.
    """

    input: str
    products: tuple[Product, ...]
    producers: tuple[str, ...]
    groups: tuple[int, int, int] | None = None
    through_cache: bool = False

    def reduce(self, per_channel: Floats) -> Floats:
        """The largest of the values [I] that must share a factor, in the producer's own channels."""
        if self.groups is None:
            return per_channel
        key_heads, shared, channels = self.groups
        reduced: Floats = per_channel.reshape(key_heads, shared, channels).max(axis=1).reshape(-1)
        return reduced

    def spread(self, factors: Floats) -> Floats:
        """Factors of the producer's channels for every channel of the input, [I]."""
        if self.groups is None:
            return factors
        key_heads, shared, channels = self.groups
        return np.repeat(factors.reshape(key_heads, 1, channels), shared, axis=1).reshape(-1)


def find_folds(piece: Piece) -> list[Fold]:
    """The folds of a layer or the head, in the graph's order."""
    values = ir.convenience.create_value_mapping(piece.graph)
    folds = []
    stored = frozenset(piece.parameters)
    for name, products in piece.product_inputs().items():
        value = values[name]
        tied = any(product.transposed for product in products)
        if tied or len(value.uses()) != len(products):
            continue
        found = _producer(value, stored)
        if found is not None:
            folds.append(Fold(name, tuple(products), found.tensors, found.groups, found.through_cache))
    return folds


def add_rescaling(rescalings: dict[str, Rescaling], fold: Fold, factors: Floats) -> None:
    """Record a fold's factors s of the producer's channels, on top of what the tensors already have."""
    for name in fold.producers:
        rescalings[name] = _joined(rescalings.get(name), Rescaling(outputs=np.reciprocal(factors)))
    for product in fold.products:
        rescalings[product.weight] = _joined(
            rescalings.get(product.weight), Rescaling(inputs=fold.spread(factors))
        )


def rescale_all(weights: Mapping[str, Floats], rescalings: Mapping[str, Rescaling]) -> dict[str, Floats]:
    """Every stored tensor, times its factors."""
    whole = slice(None)
    return {
        name: rescale(values, rescalings[name], whole, whole) if name in rescalings else values
        for name, values in weights.items()
    }


def _joined(first: Rescaling | None, second: Rescaling) -> Rescaling:
    if first is None:
        return second
    inputs = _times(first.inputs, second.inputs)
    return Rescaling(inputs, _times(first.outputs, second.outputs))


def _times(first: Floats | None, second: Floats | None) -> Floats | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second


@dataclass(frozen=True, slots=True)
class _Producer:
    """Stored tensors whose last axis carries a factor on into some value; the rest as in `Fold`."""

    tensors: tuple[str, ...]
    groups: tuple[int, int, int] | None = None
    through_cache: bool = False


def _producer(value: ir.Value, stored: Collection[str]) -> _Producer | None:
    """What takes up factors on a value that nothing else reads."""
    node = value.producer()
    if node is None:
        return None
    inputs = [source for source in node.inputs if source is not None]
    names = tuple(str(source.name) for source in inputs[1:])
    match node.op_type:
        case "RMSNormalization" | "LayerNormalization":
            return _Producer(names) if stored >= set(names) else None
        case "MatMul":
            return _Producer(names) if stored >= set(names) else None
        case "Add":
            return _biased(inputs, stored)
        case "Cast" | "Relu":
            return _only_reader(inputs[0], stored)
        case "Mul":
            found = (_only_reader(source, stored) for source in inputs)
            return next((producer for producer in found if producer is not None), None)
        case "Reshape":
            return _attention(inputs[0], stored)
    return None


def _only_reader(value: ir.Value, stored: Collection[str]) -> _Producer | None:
    """`_producer`, where one node reads the value, and reads it once."""
    return _producer(value, stored) if len(value.uses()) == 1 else None


def _biased(inputs: Sequence[ir.Value], stored: Collection[str]) -> _Producer | None:
    """A linear's output plus its stored bias."""
    for product, bias in (inputs, inputs[::-1]):
        node = product.producer()
        if bias.name in stored and node is not None and node.op_type == "MatMul":
            producer = _only_reader(product, stored)
            return None if producer is None else _Producer((*producer.tensors, str(bias.name)))
    return None


def _attention(heads_first: ir.Value, stored: Collection[str]) -> _Producer | None:
    """The value projection behind Reshape(Transpose(Attention)): the probabilities do not depend on it."""
    attention = _maker(_input(_maker(heads_first, "Transpose"), 0), "Attention")
    values = _input(attention, 2)
    split = _maker(_input(_maker(_input(_maker(values, "TensorScatter"), 1), "Transpose"), 0), "Reshape")
    projected = _input(split, 0)
    if attention is None or values is None or projected is None:
        return None
    producer = _only_reader(projected, stored)
    attended, cached = attention.outputs[0].shape, values.shape
    if producer is None or attended is None or cached is None:
        return None
    heads, key_heads, channels = attended[1], cached[1], cached[3]
    assert isinstance(heads, int)
    assert isinstance(key_heads, int)
    assert isinstance(channels, int)
    return _Producer(producer.tensors, (key_heads, heads // key_heads, channels), through_cache=True)


def _maker(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of a type that makes a value, where one node reads it."""
    node = None if value is None or len(value.uses()) != 1 else value.producer()
    return node if node is not None and node.op_type == op_type else None


def _input(node: ir.Node | None, index: int) -> ir.Value | None:
    return None if node is None or len(node.inputs) <= index else node.inputs[index]
