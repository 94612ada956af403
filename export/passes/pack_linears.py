"""Matrix products with constant weights as `PackedLinear`, embedding tables as `PackedGather`."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from kvgraph.export.contract import INPUT_IDS
from kvgraph.export.packed.stored_matrix import StoredMatrix
from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.matching import (
    constant_number,
    constant_values,
    float_attribute,
    int_attribute,
    made_by,
    other_input,
    sole_reader,
)
from kvgraph.export.passes.stored_weights import stored_matrix


def pack_linears(model: ir.Model) -> bool:
    """Replace the matrix products whose weights the kernels read, and the embedding's lookup.

    Rules:
        * `MatMul(x, W)` and `Gemm(x, W [, bias])`, W a matrix in floats or dequantized from integers, see
          `stored_matrix`. Integers round their input, too: per block of 32, as ONNX Runtime does where a recipe
          quantizes weights alone; by one scale where x comes from Q/DQ; by a scale of each token where a recipe says
          so, and then the product's multiplication by that scale goes, too.
        * `Gather(table, input_ids)`: a table is a matrix that lies transposed. One that is the head as well is packed
          once.
        * Weights whose input is rounded in another way, and weights of other types, stay.
    """
    changed = False
    for node in list(model.graph):
        if node.domain:
            continue
        if node.op_type in ("MatMul", "Gemm"):
            changed |= _pack_product(model.graph, node)
        elif node.op_type == "Gather":
            changed |= _pack_lookup(model.graph, node)
    return changed


@dataclass(frozen=True, slots=True)
class _Rounding:
    """How the input of a product is rounded.

    Attributes:
        source: The input before it is rounded.
        form: Attribute `input` of PackedLinear.
        scale: The scale of all inputs, if they have one.
        token_scale: What the product is multiplied by.
    """

    source: ir.Value
    form: str
    scale: float | None = None
    token_scale: ir.Value | None = None


def _pack_product(graph: ir.Graph, node: ir.Node) -> bool:
    transposed = bool(int_attribute(node, "transB", 0))
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    plain = (
        not int_attribute(node, "transA", 0)
        and float_attribute(node, "alpha", 1.0) == 1.0
        and (bias is None or float_attribute(node, "beta", 1.0) == 1.0)
    )
    x, weight = node.inputs[:2]
    matrix = stored_matrix(weight, transposed) if plain else None
    if x is None or matrix is None or not _is_vector(bias, matrix.out_features):
        return False
    rounding = _rounding(x, matrix)
    result = node.outputs[0]
    if rounding is None:
        return False
    if rounding.token_scale is not None:
        reader = sole_reader(result)
        if bias is not None or reader is None or reader.op_type != "Mul":
            return False
        if other_input(reader, result) is not rounding.token_scale:
            return False
        result = reader.outputs[0]
    value = packed.weight_value(matrix)
    new = packed.linear(rounding.source, value, bias, rounding.form, rounding.scale, f"{node.name}/packed")
    graph.insert_after(node, new)
    packed.replace(graph, result, new)
    return True


def _is_vector(bias: ir.Value | None, size: int) -> bool:
    if bias is None:
        return True
    values = constant_values(bias)
    return values is not None and values.shape == (size,)


def _rounding(x: ir.Value, matrix: StoredMatrix) -> _Rounding | None:
    """How the input of a product is rounded, if the kernels can do that."""
    if matrix.kind == "float":
        return _Rounding(x, "float")
    dequantize = made_by(x, "DequantizeLinear")
    if dequantize is None:
        return _Rounding(x, "block")
    quantize = made_by(dequantize.inputs[0], "QuantizeLinear")
    if quantize is None or quantize.inputs[1:] != dequantize.inputs[1:] or matrix.kind != "int8":
        return None
    source, scale, *zero_point = quantize.inputs
    number = constant_number(scale)
    symmetric = len(zero_point) == 1 and _is_int8_zero(zero_point[0])
    if source is None or number is None or not symmetric:
        return None
    if number != 1.0:
        return _Rounding(source, "static", number)
    token = _token_scale(source)
    return (
        _Rounding(source, "static", number) if token is None else _Rounding(token[0], "token", None, token[1])
    )


def _is_int8_zero(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.INT8 and constant_number(value) == 0


def _token_scale(scaled: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The value and the scale of `x / max(max |x| / 127, least)`, which `quantize_tokens` writes."""
    division = made_by(scaled, "Div")
    if division is None:
        return None
    source, scale = division.inputs
    least = made_by(scale, "Max")
    exact = made_by(least.inputs[0], "Div") if least is not None and len(least.inputs) == 2 else None
    largest = made_by(exact.inputs[0], "ReduceMax") if exact is not None else None
    magnitude = made_by(largest.inputs[0], "Abs") if largest is not None else None
    if (
        source is None
        or scale is None
        or least is None
        or exact is None
        or largest is None
        or magnitude is None
    ):
        return None
    floor = constant_number(least.inputs[1])
    alike = (
        magnitude.inputs[0] is source
        and constant_number(exact.inputs[1]) == 127
        and len(largest.inputs) == 2
        and constant_number(largest.inputs[1]) == -1
        and int_attribute(largest, "keepdims", 1) == 1
        # Smaller tokens than that are zeros but in name.
        and floor is not None
        and floor < 1e-5
    )
    return (source, scale) if alike else None


def _pack_lookup(graph: ir.Graph, node: ir.Node) -> bool:
    table, ids = node.inputs
    if (
        ids is None
        or ids.name != INPUT_IDS
        or not ids.is_graph_input()
        or int_attribute(node, "axis", 0) != 0
    ):
        return False
    matrix = stored_matrix(table, transposed=True)
    if matrix is None:
        return False
    attributes = [
        ir.AttrInt64("in_features", matrix.in_features),
        ir.AttrInt64("out_features", matrix.out_features),
    ]
    inputs = [packed.weight_value(matrix), ids]
    new = packed.operator(packed.GATHER, inputs, attributes, f"{node.name}/packed")
    graph.insert_after(node, new)
    packed.replace(graph, node.outputs[0], new)
    return True
