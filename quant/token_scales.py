"""Graph passes of quantization: inputs of matrix products whose scales are found in the graph, token by token."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.passes.constants import int64_constant, scalar
from kvgraph.export.passes.insert import insert
from kvgraph.quant.formats import FORMATS
from kvgraph.quant.graph_ops import first_of, product_inputs, round_trip

# Least scale of a token: far below any activation, and in float16, whose scales lose digits below 6e-5, above the
# values where a scale's own rounding would make the largest values saturate by more than a few percent.
_LEAST_TOKEN_SCALE = {ir.DataType.FLOAT16: 2.0**-20}
_OTHER_LEAST_TOKEN_SCALE = 2.0**-100


def quantize_tokens(model: ir.Model, weights: Collection[str], form: str) -> bool:
    """Round the inputs of matrix products, named by their weights, by a scale of each token's own.

    Rules: s = max |x| / the format's maximum over the last axis, at least a tiny number for rows of zeros; x / s goes
    through Q/DQ with scale 1; what comes out of the product is multiplied by s, before a bias is added. That way the
    scales of Q/DQ are constants, as TensorRT needs, and the product is one of integers, as ONNX Runtime fuses it.
    """
    graph = model.graph
    for value, products in product_inputs(graph, weights).items():
        assert value.dtype is not None
        tape, name = Tape(), f"{value.name}/{form}"
        rounded, scale = _by_largest(graph, tape, value, value.dtype, form, name)
        nodes = [node for node, _ in products]
        graph.insert_before(first_of(graph, nodes), tape.nodes)
        for node in nodes:
            node.replace_input_with(0, rounded)
            _multiply_output(graph, node, scale)
    return bool(weights)


def quantize_token_blocks(model: ir.Model, weights: Collection[str], form: str, block_size: int) -> bool:
    """Round the inputs of matrix products, named by their weights, by a scale for every block of a token's entries.

    Rules: as in `quantize_tokens`, but for the scales: they differ within a sum, so that they are multiplied before it.
    """
    graph = model.graph
    for value, products in product_inputs(graph, weights).items():
        assert value.dtype is not None
        assert value.shape is not None
        tape, name, width = Tape(), f"{value.name}/{form}.{block_size}", value.shape[-1]
        assert isinstance(width, int)
        # 0 keeps what the dimension is.
        kept = [0] * (len(value.shape) - 1)
        inner = int64_constant(graph, *kept, width // block_size, block_size)
        blocks = insert(tape, "Reshape", [value, inner], f"{name}/blocks")
        rounded, scale = _by_largest(graph, tape, blocks, value.dtype, form, name)
        whole = insert(tape, "Mul", [rounded, scale], f"{name}/multiplied")
        restored = insert(tape, "Reshape", [whole, int64_constant(graph, *kept, width)], f"{name}/restored")
        blocks.type, whole.type, restored.type, restored.shape = (
            value.type,
            value.type,
            value.type,
            value.shape,
        )
        nodes = [node for node, _ in products]
        for node in nodes:
            node.replace_input_with(0, restored)
        graph.insert_before(first_of(graph, nodes), tape.nodes)
    return bool(weights)


def _by_largest(
    graph: ir.Graph, tape: Tape, value: ir.Value, dtype: ir.DataType, form: str, name: str
) -> tuple[ir.Value, ir.Value]:
    """A value rounded in units of its largest magnitudes along the last axis over the format's maximum; the units."""
    maximum = scalar(graph, FORMATS[form].maximum, dtype)
    least = scalar(graph, _LEAST_TOKEN_SCALE.get(dtype, _OTHER_LEAST_TOKEN_SCALE), dtype)
    magnitude = insert(tape, "Abs", [value], f"{name}/magnitude")
    largest = insert(tape, "ReduceMax", [magnitude, int64_constant(graph, -1)], f"{name}/largest")
    exact = insert(tape, "Div", [largest, maximum], f"{name}/exact_scale")
    scale = insert(tape, "Max", [exact, least], f"{name}/scale")
    scaled = insert(tape, "Div", [value, scale], f"{name}/scaled")
    for made in (magnitude, largest, exact, scale, scaled):
        made.type = ir.TensorType(dtype)
    return round_trip(graph, tape, scaled, scalar(graph, 1.0, dtype), form, name), scale


def _multiply_output(graph: ir.Graph, node: ir.Node, factor: ir.Value) -> None:
    """Multiply what a node gives; the product takes over the name, and what the output was of the graph."""
    old = node.outputs[0]
    tape = Tape()
    product = insert(tape, "Mul", [old, factor], f"{old.name}")
    product.type, product.shape = old.type, old.shape
    old.name = f"{old.name}/unscaled"
    ir.convenience.replace_all_uses_with(old, product, replace_graph_outputs=True)
    tape.nodes[0].replace_input_with(0, old)
    graph.insert_after(node, tape.nodes)
