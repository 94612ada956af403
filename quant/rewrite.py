"""Graph passes of quantization: weights and inputs of matrix products through `QuantizeLinear`/`DequantizeLinear`.

All nodes are standard operators of opset 24. Symmetric formats have no zero point on weights and a zero point of 0 on
inputs, which says the type and is what TensorRT asks for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.assemble import ir_dtype
from kvgraph.export.contract import TensorSpec
from kvgraph.export.passes.constants import constant, int64_constant
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightLayout
from kvgraph.quant.formats import FORMATS
from kvgraph.quant.storage import StoredWeight

# Least scale of a token: far below any activation, and in float16, whose scales lose digits below 6e-5, above the
# values where a scale's own rounding would make the largest values saturate by more than a few percent.
_LEAST_TOKEN_SCALE = {ir.DataType.FLOAT16: 2.0**-20}
_OTHER_LEAST_TOKEN_SCALE = 2.0**-100


def relocate_weights(model: ir.Model, layout: WeightLayout, names: Mapping[str, str]) -> bool:
    """Point every external tensor to its place in a new weights file.

    Args:
        model: A graph over another weights file.
        layout: The new one.
        names: Name in the graph -> name in the file and, from now on, in the graph; others keep theirs.
    """
    changed = False
    for name, value in list(model.graph.initializers.items()):
        if not isinstance(value.const_value, ir.ExternalTensor):
            continue
        del model.graph.initializers[name]
        value.name = names.get(name, name)
        value.const_value = _external(layout, value.name)
        model.graph.register_initializer(value)
        changed = True
    return changed


def dequantize_weight(model: ir.Model, stored: StoredWeight, layout: WeightLayout) -> bool:
    """Replace a float weight by its codes and a `DequantizeLinear` that all of its readers share.

    Rules:
        * One scale for each output: `axis` is the outputs' axis. Blocks: `axis` is the inputs' axis, with `block_size`;
          so, too, for experts, of which one axis alone would not name an output.
        * NVFP4: a first `DequantizeLinear` multiplies the E4M3 scales by the global scale and rounds to the compute
          type, a second one the codes by that.
        * Tables and experts are dequantized before their `Gather`, which takes no 4-bit or 8-bit float types.
    """
    graph = model.graph
    weight = graph.initializers.get(stored.linear.tensor)
    if weight is None:
        return False
    assert weight.dtype is not None
    tape = Tape()
    scale = _initializer(graph, layout, stored.scale)
    if stored.global_scale is not None:
        factor = _initializer(graph, layout, stored.global_scale)
        attributes = {} if weight.dtype == ir.DataType.FLOAT else {"output_dtype": int(weight.dtype)}
        scale = _op(tape, "DequantizeLinear", [scale, factor], f"{stored.scale.name}/dequantized", attributes)
        scale.type, scale.shape = weight.type, ir.Shape(stored.scale.shape)
    readers = [(use.node, use.idx) for use in weight.uses()]
    del graph.initializers[stored.linear.tensor]
    inputs = [_initializer(graph, layout, stored.codes), scale]
    if stored.zero_point is not None:
        inputs.append(_initializer(graph, layout, stored.zero_point))
    result = _op(tape, "DequantizeLinear", inputs, f"{stored.codes.name}/dequantized", _granularity(stored))
    result.type, result.shape = weight.type, ir.Shape(stored.linear.shape)
    for node, index in readers:
        node.replace_input_with(index, result)
    graph.insert_before(_first(graph, [node for node, _ in readers]), tape.nodes)
    return True


def quantize_inputs(model: ir.Model, scales: Mapping[str, float], form: str) -> bool:
    """Round the inputs of matrix products by calibrated scales; products that share input and scale share the nodes.

    Args:
        model: A graph whose weights may be quantized already.
        scales: Name of a product's weight -> scale of its input.
        form: "int8" or "float8_e4m3fn".
    """
    graph = model.graph
    for value, products in _inputs(graph, scales).items():
        assert value.dtype is not None
        groups: dict[float, list[ir.Node]] = {}
        for node, weight in products:
            groups.setdefault(scales[weight], []).append(node)
        for index, (scale, nodes) in enumerate(groups.items()):
            tape = Tape()
            name = f"{value.name}/{form}" + (f".{index}" if index else "")
            rounded = _round_trip(graph, tape, value, _scalar(graph, scale, value.dtype), form, name)
            for node in nodes:
                node.replace_input_with(0, rounded)
            graph.insert_before(_first(graph, nodes), tape.nodes)
    return bool(scales)


def quantize_tokens(model: ir.Model, weights: Collection[str], form: str) -> bool:
    """Round the inputs of matrix products, named by their weights, by a scale of each token's own.

    Rules: s = max |x| / the format's maximum over the last axis, at least a tiny number for rows of zeros; x / s goes
    through Q/DQ with scale 1; what comes out of the product is multiplied by s, before a bias is added. That way the
    scales of Q/DQ are constants, as TensorRT needs, and the product is one of integers, as ONNX Runtime fuses it.
    """
    graph = model.graph
    for value, products in _inputs(graph, weights).items():
        assert value.dtype is not None
        tape, name = Tape(), f"{value.name}/{form}"
        maximum = _scalar(graph, FORMATS[form].maximum, value.dtype)
        least = _scalar(graph, _LEAST_TOKEN_SCALE.get(value.dtype, _OTHER_LEAST_TOKEN_SCALE), value.dtype)
        magnitude = _op(tape, "Abs", [value], f"{name}/magnitude")
        largest = _op(tape, "ReduceMax", [magnitude, int64_constant(graph, -1)], f"{name}/largest")
        exact = _op(tape, "Div", [largest, maximum], f"{name}/exact_scale")
        scale = _op(tape, "Max", [exact, least], f"{name}/scale")
        scaled = _op(tape, "Div", [value, scale], f"{name}/scaled")
        rounded = _round_trip(graph, tape, scaled, _scalar(graph, 1.0, value.dtype), form, name)
        nodes = [node for node, _ in products]
        for made in tape.nodes:
            if made.outputs[0].type is None:
                made.outputs[0].type = value.type
        graph.insert_before(_first(graph, nodes), tape.nodes)
        for node in nodes:
            node.replace_input_with(0, rounded)
            _multiply_output(graph, node, scale)
    return bool(weights)


def _round_trip(
    graph: ir.Graph, tape: Tape, value: ir.Value, scale: ir.Value, form: str, name: str
) -> ir.Value:
    """A value through QuantizeLinear and DequantizeLinear, saturating."""
    zero_point = constant(graph, f"{form}.0", np.zeros((), FORMATS[form].element))
    saturate = {} if FORMATS[form].integer else {"saturate": 1}
    codes = _op(tape, "QuantizeLinear", [value, scale, zero_point], f"{name}/codes", saturate)
    codes.type = ir.TensorType(ir_dtype(form))
    result = _op(tape, "DequantizeLinear", [codes, scale, zero_point], f"{name}/rounded")
    result.type, result.shape, codes.shape = value.type, value.shape, value.shape
    return result


def _multiply_output(graph: ir.Graph, node: ir.Node, factor: ir.Value) -> None:
    """Multiply what a node gives; the product takes over the name, and what the output was of the graph."""
    old = node.outputs[0]
    tape = Tape()
    product = _op(tape, "Mul", [old, factor], f"{old.name}")
    product.type, product.shape = old.type, old.shape
    old.name = f"{old.name}/unscaled"
    ir.convenience.replace_all_uses_with(old, product, replace_graph_outputs=True)
    tape.nodes[0].replace_input_with(0, old)
    graph.insert_after(node, tape.nodes)


def _inputs(graph: ir.Graph, weights: Collection[str]) -> dict[ir.Value, list[tuple[ir.Node, str]]]:
    """First inputs of matrix products -> the products and their weights, which may be dequantized on the way."""
    found: dict[ir.Value, list[tuple[ir.Node, str]]] = {}
    for node in graph:
        if node.op_type != "MatMul":
            continue
        value, weight = node.inputs
        producer = None if weight is None else weight.producer()
        if producer is not None and producer.op_type == "DequantizeLinear":
            weight = producer.inputs[0]
        name = None if weight is None else weight.name
        if value is not None and name is not None and name in weights:
            found.setdefault(value, []).append((node, name))
    return found


def _granularity(stored: StoredWeight) -> dict[str, int]:
    linear, block_size = stored.linear, stored.scheme.block_size
    if linear.kind == "experts":
        return {"axis": linear.inputs_axis, "block_size": block_size or linear.inputs}
    if block_size is None:
        return {"axis": 1 - linear.inputs_axis}
    return {"axis": linear.inputs_axis, "block_size": block_size}


def _op(
    tape: Tape,
    op_type: str,
    inputs: Sequence[ir.Value],
    name: str,
    attributes: Mapping[str, int] | None = None,
) -> ir.Value:
    result = tape.op(op_type, list(inputs), dict(attributes or {}), name=f"{name}/{op_type}")
    result.name = name
    return result


def _first(graph: ir.Graph, nodes: Sequence[ir.Node]) -> ir.Node:
    """The one of some nodes that comes first."""
    wanted = set(nodes)
    return next(node for node in graph if node in wanted)


def _scalar(graph: ir.Graph, number: float, dtype: ir.DataType) -> ir.Value:
    return constant(graph, f"{dtype.name.lower()}.{float(number)!r}", np.array(number), dtype)


def _initializer(graph: ir.Graph, layout: WeightLayout, spec: TensorSpec) -> ir.Value:
    tensor = _external(layout, spec.name)
    value = ir.Value(
        name=spec.name, shape=ir.Shape(spec.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _external(layout: WeightLayout, name: str) -> ir.ExternalTensor:
    stored = layout.tensors[name]
    return ir.ExternalTensor(
        WEIGHTS_FILE,
        stored.offset,
        stored.size,
        ir_dtype(stored.dtype),
        shape=ir.Shape(stored.shape),
        name=name,
    )
