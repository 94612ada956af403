"""Where a graph's residual stream and its attention's values can be rotated, so that the function stays.

With an orthogonal Q the stream x becomes x Q. RMS norms do not see it once their weights are part of what reads them;
whatever reads the stream is multiplied by Q^T, whatever writes to it by Q. The values of every head are rotated by a
matrix of their own, which the output projection takes back. No operator is added:

| tensor | becomes |
|---|---|
| embedding table [V, E] | W Q |
| a product behind a norm with weights g, [E, O] | Q^T diag(g) W |
| a head that is tied to the table | a table of its own, W diag(g) Q |
| a product whose result is added to the stream, its bias | W Q, b Q |
| the norm's weights | 1 |
| value and output projections | also W (I x H) and (I x H)^T W |

Every family is served by what its graph shows. Refused are norms that subtract the mean, norms between a product and
the stream, and experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import onnx_ir as ir

from kvgraph.quant.layer_graph import EMBEDDING_TABLE, LayeredGraph
from kvgraph.quant.rescaling import find_folds

_PASSING = ("Cast", "GatherND", "Reshape", "Identity")


@dataclass(frozen=True, slots=True)
class RotationSites:
    """Stored tensors by what a rotation does to them.

    Attributes:
        readers: Weight [E, O] -> the norm before it, or None where it reads the stream itself.
        writers: Weights [I, E] and biases [E] whose result is added to the stream.
        tied_norm: The norm before a head that is tied to the embedding table; None where the head has its own.
        norms: Weights [E] that become 1.
        values: Weights [I, K * D] and biases of value projections.
        outputs: Weights [H * D, E] of output projections.
        head_dim: D of those.
    """

    readers: dict[str, str | None] = field(default_factory=dict)
    writers: set[str] = field(default_factory=set)
    tied_norm: str | None = None
    norms: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    outputs: set[str] = field(default_factory=set)
    head_dim: int = 1


def find_rotation_sites(model: ir.Model, stored: Collection[str], num_layers: int) -> RotationSites:
    """The tensors that take part in a rotation.

    Args:
        model: The prefill graph of a float bundle.
        stored: Names of the bundle's tensors.
        num_layers: Layers of the decoder.

    Raises:
        ValueError: Something reads or writes the residual stream that does not let a rotation through.
    """
    finder = _Finder(model.graph, frozenset(stored))
    finder.follow_stream()
    values, outputs, head_dim = _value_sites(LayeredGraph(model, stored, num_layers))
    return RotationSites(
        finder.readers, finder.writers, finder.tied_norm, finder.norms, values, outputs, head_dim
    )


def _value_sites(graph: LayeredGraph) -> tuple[set[str], set[str], int]:
    """Value and output projections of the layers in which nothing else is between them, and D."""
    values: set[str] = set()
    outputs: set[str] = set()
    head_dim = 1
    for layer in range(graph.num_layers):
        for fold in find_folds(graph.layer(layer)):
            if fold.through_cache and fold.groups is not None:
                values |= set(fold.producers)
                outputs |= {product.weight for product in fold.products}
                head_dim = fold.groups[2]
    return values, outputs, head_dim


class _Finder:
    """Follows the residual stream through a graph."""

    def __init__(self, graph: ir.Graph, stored: frozenset[str]) -> None:
        self.readers: dict[str, str | None] = {}
        self.writers: set[str] = set()
        self.norms: set[str] = set()
        self.tied_norm: str | None = None
        self._graph = graph
        self._stored = stored
        self._stream: set[ir.Value] = set()

    def follow_stream(self) -> None:
        """Sort everything that touches the stream, in the graph's order."""
        for node in self._graph:
            if node.op_type == "Gather" and self._stored_name(node, 0) == EMBEDDING_TABLE:
                self._stream.add(node.outputs[0])
            elif any(value in self._stream for value in node.inputs):
                self._visit(node)
        if not self._stream:
            raise self._refusal("the token embedding is not looked up by Gather")

    def _visit(self, node: ir.Node) -> None:
        if node.op_type == "Shape":
            return
        if node.op_type in _PASSING or self._is_scaled(node):
            self._stream.add(node.outputs[0])
        elif node.op_type == "Add":
            for value in node.inputs:
                if value is not None and value not in self._stream:
                    self._find_writer(value)
            self._stream.add(node.outputs[0])
        elif node.op_type == "RMSNormalization":
            norm = self._stored_name(node, 1)
            if norm is None:
                raise self._refusal(f"the weights of norm {node.name!r} are computed")
            self.norms.add(norm)
            self._find_readers(node.outputs[0], norm)
        elif node.op_type == "LayerNormalization":
            raise self._refusal("its norms are LayerNorm, which subtracts the mean of the channels")
        else:
            self._find_reader(node, node.inputs[0], None)

    def _find_readers(self, normed: ir.Value, norm: str) -> None:
        for node in normed.consumers():
            if node.op_type in _PASSING:
                self._find_readers(node.outputs[0], norm)
            else:
                self._find_reader(node, normed, norm)

    def _find_reader(self, node: ir.Node, value: ir.Value | None, norm: str | None) -> None:
        weight = self._stored_name(node, 1) if len(node.inputs) > 1 else None
        tied = node.op_type == "Gemm" and weight == EMBEDDING_TABLE
        known = tied or (node.op_type == "MatMul" and self._rank(node.inputs[1]) == 2)
        if weight is None or not known or node.inputs[0] is not value:
            raise self._refusal(f"node {node.name!r} ({node.op_type}) reads the residual stream")
        if tied:
            self.tied_norm = norm
        elif self.readers.setdefault(weight, norm) != norm:
            raise self._refusal(f"{weight!r} is read behind two norms")

    def _find_writer(self, value: ir.Value) -> None:
        """The stored product that makes a value on its way into the stream."""
        node = value.producer()
        if node is None or len(value.uses()) != 1:
            raise self._refusal(f"{value.name!r} is added to the residual stream and used elsewhere")
        weight = self._stored_name(node, 1) if len(node.inputs) > 1 else None
        if node.op_type == "MatMul" and weight is not None and self._rank(node.inputs[1]) == 2:
            self.writers.add(weight)
        elif node.op_type == "Cast" or self._is_scaled(node):
            self._find_writer(
                next(source for source in node.inputs if source and not self._is_scalar(source))
            )
        elif node.op_type == "Add":
            self._find_biased_writer(node)
        else:
            what = "a norm" if "Normalization" in node.op_type else f"node {node.name!r} ({node.op_type})"
            raise self._refusal(f"{what} is between a product and the residual stream")

    def _find_biased_writer(self, node: ir.Node) -> None:
        for value in node.inputs:
            assert value is not None
            if value.name in self._stored:
                self.writers.add(str(value.name))
            else:
                self._find_writer(value)

    def _stored_name(self, node: ir.Node, index: int) -> str | None:
        value = node.inputs[index]
        return value.name if value is not None and value.name in self._stored else None

    def _rank(self, value: ir.Value | None) -> int:
        return -1 if value is None or value.shape is None else len(value.shape)

    def _is_scaled(self, node: ir.Node) -> bool:
        """Whether a node multiplies by one number."""
        return node.op_type in ("Mul", "Div") and any(map(self._is_scalar, node.inputs))

    def _is_scalar(self, value: ir.Value | None) -> bool:
        """Whether a value is a constant number."""
        constant = value is not None and value.is_initializer() and value.name not in self._stored
        return (
            constant and value is not None and value.shape is not None and value.shape.numpy() in ((), (1,))
        )

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._graph.name}: cannot be rotated, {reason}; leave rotation out of the recipe, smooth_quant or awq "
            "may help instead"
        )
