"""Graph passes of quantization: weights and inputs of matrix products through `QuantizeLinear`/`DequantizeLinear`.

All nodes are standard operators of opset 24. Symmetric formats have no zero point on weights and a zero point of 0 on
inputs, which says the type and is what TensorRT asks for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from kvgraph.export.contract import TensorSpec
from kvgraph.export.passes.constants import constant, ir_dtype, scalar
from kvgraph.export.passes.insert import insert
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightLayout
from kvgraph.quant.graph_ops import dequantized, first_of, product_inputs, round_trip
from kvgraph.quant.storage import StoredWeight


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
        * Scales of another type than the graph's: 8-bit floats are dequantized to the graph's type at once, as TensorRT
          multiplies them; integers to the scales' type and then cast, for ONNX Runtime fuses the first form wrongly.
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
        scale = insert(
            tape, "DequantizeLinear", [scale, factor], f"{stored.scale.name}/dequantized", attributes
        )
        scale.type, scale.shape = weight.type, ir.Shape(stored.scale.shape)
    readers = [(use.node, use.idx) for use in weight.uses()]
    del graph.initializers[stored.linear.tensor]
    inputs = [_initializer(graph, layout, stored.codes), scale]
    if stored.zero_point is not None:
        inputs.append(_initializer(graph, layout, stored.zero_point))
    result = dequantized(tape, inputs, f"{stored.codes.name}/dequantized", _granularity(stored), weight.dtype)
    result.type, result.shape = weight.type, ir.Shape(stored.linear.shape)
    for node, index in readers:
        node.replace_input_with(index, result)
    graph.insert_before(first_of(graph, [node for node, _ in readers]), tape.nodes)
    return True


def reorder_inputs(model: ir.Model, orders: Mapping[str, NDArray[np.int32]]) -> bool:
    """Put the inputs of matrix products into the order of their weights; products that share both share the node.

    Args:
        model: A graph whose weights are quantized.
        orders: Name of a product's weight -> which of the inputs comes first, second, ...
    """
    graph = model.graph
    for value, products in product_inputs(graph, orders).items():
        groups: dict[str, list[ir.Node]] = {}
        for node, weight in products:
            digest = hashlib.sha256(orders[weight].tobytes()).hexdigest()[:16]
            indices = constant(graph, f"input_order.{digest}", orders[weight])
            groups.setdefault(indices.name or "", []).append(node)
        for name, nodes in groups.items():
            tape = Tape()
            gathered = insert(
                tape, "Gather", [value, graph.initializers[name]], f"{value.name}/{name}", {"axis": -1}
            )
            gathered.type, gathered.shape = value.type, value.shape
            for node in nodes:
                node.replace_input_with(0, gathered)
            graph.insert_before(first_of(graph, nodes), tape.nodes)
    return bool(orders)


def quantize_inputs(model: ir.Model, scales: Mapping[str, float], form: str, exact: bool = False) -> bool:
    """Round the inputs of matrix products by calibrated scales; products that share input and scale share the nodes.

    Args:
        model: A graph whose weights may be quantized already.
        scales: Name of a product's weight -> scale of its input.
        form: "int8" or "float8_e4m3fn".
        exact: Keep scales in float32, whatever the graph's type.
    """
    graph = model.graph
    for value, products in product_inputs(graph, scales).items():
        assert value.dtype is not None
        groups: dict[float, list[ir.Node]] = {}
        for node, weight in products:
            groups.setdefault(scales[weight], []).append(node)
        for index, (scale, nodes) in enumerate(groups.items()):
            tape = Tape()
            name = f"{value.name}/{form}" + (f".{index}" if index else "")
            dtype = ir.DataType.FLOAT if exact else value.dtype
            rounded = round_trip(graph, tape, value, scalar(graph, scale, dtype), form, name)
            for node in nodes:
                node.replace_input_with(0, rounded)
            graph.insert_before(first_of(graph, nodes), tape.nodes)
    return bool(scales)


def _granularity(stored: StoredWeight) -> dict[str, int]:
    linear, block_size = stored.linear, stored.scheme.block_size
    if linear.kind == "experts":
        return {"axis": linear.inputs_axis, "block_size": block_size or linear.inputs}
    if block_size is None:
        return {"axis": 1 - linear.inputs_axis}
    return {"axis": linear.inputs_axis, "block_size": block_size}


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
