"""What the passes of quantization are put together from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.tape import Tape

from kvgraph.export.passes.constants import constant, ir_dtype
from kvgraph.export.passes.insert import insert
from kvgraph.quant.formats import FORMATS


def product_inputs(graph: ir.Graph, weights: Collection[str]) -> dict[ir.Value, list[tuple[ir.Node, str]]]:
    """First inputs of matrix products -> the products and their weights, which may be dequantized on the way."""
    found: dict[ir.Value, list[tuple[ir.Node, str]]] = {}
    for node in graph:
        if node.op_type != "MatMul":
            continue
        value, weight = node.inputs
        producer = None if weight is None else weight.producer()
        # Experts are chosen, and values cast, behind the `DequantizeLinear`.
        while producer is not None and producer.op_type in ("Cast", "Gather"):
            weight = producer.inputs[0]
            producer = None if weight is None else weight.producer()
        if producer is not None and producer.op_type == "DequantizeLinear":
            weight = producer.inputs[0]
        name = None if weight is None else weight.name
        if value is not None and name is not None and name in weights:
            found.setdefault(value, []).append((node, name))
    return found


def round_trip(
    graph: ir.Graph, tape: Tape, value: ir.Value, scale: ir.Value, form: str, name: str
) -> ir.Value:
    """A value through QuantizeLinear and DequantizeLinear, saturating."""
    zero_point = constant(graph, f"{form}.0", np.zeros((), FORMATS[form].element))
    saturate = {} if FORMATS[form].integer else {"saturate": 1}
    codes = insert(tape, "QuantizeLinear", [value, scale, zero_point], f"{name}/codes", saturate)
    codes.type, codes.shape = ir.TensorType(ir_dtype(form)), value.shape
    assert value.dtype is not None
    result = dequantized(tape, [codes, scale, zero_point], f"{name}/rounded", {}, value.dtype)
    result.type, result.shape = value.type, value.shape
    return result


def dequantized(
    tape: Tape, inputs: Sequence[ir.Value], name: str, attributes: Mapping[str, int], dtype: ir.DataType
) -> ir.Value:
    """Codes, scale and zero point as values of `dtype`; the scale may be of another type."""
    codes, scale = inputs[:2]
    if scale.dtype == dtype:
        return insert(tape, "DequantizeLinear", inputs, name, attributes)
    if codes.dtype == ir.DataType.FLOAT8E4M3FN:
        return insert(tape, "DequantizeLinear", inputs, name, {**attributes, "output_dtype": int(dtype)})
    wide = insert(tape, "DequantizeLinear", inputs, f"{name}/wide", attributes)
    wide.type, wide.shape = ir.TensorType(scale.dtype or ir.DataType.FLOAT), codes.shape
    return insert(tape, "Cast", [wide], name, {"to": int(dtype)})


def first_of(graph: ir.Graph, nodes: Sequence[ir.Node]) -> ir.Node:
    """The one of some nodes that comes first."""
    wanted = set(nodes)
    return next(node for node in graph if node in wanted)
