"""The scaling of float16 products in a graph that computes in float32."""

from __future__ import annotations

import onnx_ir as ir

from kvgraph.export.passes.matching import constant_number, input_of, made_by, other_input, sole_reader


def remove_row_scales(model: ir.Model) -> bool:
    """Take out the powers of two that keep products in float16's range, see `kvgraph.models.layers.stream_product`.

    Rules:
        * In `((x / s) W) * s`, s = 2 ** ceil(log2(max(1, max |x|))) of each row, x stands for x / s and the product for
          its multiple.
        * The same where the product is one of integers whose scales follow from the tokens, which they do from x as
          well: `x / s` goes through Div, Q/DQ with scale 1, the product, and a Mul by what it was divided by.
        * Where x / s is rounded by a scale that was calibrated, s stays.
    """
    changed = False
    for node in list(model.graph):
        if node.op_type != "Div" or node.domain:
            continue
        x, scale = node.inputs
        if x is None or scale is None or not _is_row_scale(scale, x):
            continue
        multiples = [
            _multiple(node.outputs[0], use.node, scale) for use in scale.uses() if use.node is not node
        ]
        if not multiples or None in multiples:
            continue
        ir.convenience.replace_all_uses_with(node.outputs[0], x)
        for multiple in multiples:
            assert multiple is not None
            product = other_input(multiple, scale)
            assert product is not None
            ir.convenience.replace_all_uses_with(multiple.outputs[0], product)
        changed = True
    return changed


def _is_row_scale(scale: ir.Value, x: ir.Value) -> bool:
    """Whether a value is the power of two of x's rows."""
    power = made_by(scale, "Pow")
    ceiling = None if power is None else made_by(power.inputs[1], "Ceil")
    binary = None if ceiling is None else made_by(ceiling.inputs[0], "Mul")
    logarithm = None if binary is None else made_by(binary.inputs[0], "Log")
    largest = None if logarithm is None else made_by(logarithm.inputs[0], "Max")
    reduced = None if largest is None else made_by(largest.inputs[0], "ReduceMax")
    magnitude = None if reduced is None else made_by(reduced.inputs[0], "Abs")
    if power is None or largest is None or magnitude is None:
        return False
    return (
        constant_number(power.inputs[0]) == 2
        and constant_number(input_of(largest, 1)) == 1
        and magnitude.inputs[0] is x
    )


def _multiple(scaled: ir.Value, node: ir.Node, scale: ir.Value) -> ir.Node | None:
    """`node`, if it multiplies a product of `scaled` by the scale."""
    if node.op_type != "Mul":
        return None
    product = other_input(node, scale)
    if product is None or sole_reader(product) is not node:
        return None
    token = made_by(product, "Mul")
    matmul = made_by(product, "MatMul") if token is None else _product_of_tokens(token, scaled)
    if matmul is None:
        return None
    return node if token is not None or matmul.inputs[0] is scaled else None


def _product_of_tokens(multiple: ir.Node, scaled: ir.Value) -> ir.Node | None:
    """The product of integers that a node multiplies by the scale of each token of `scaled`."""
    for matmul, token in ((0, 1), (1, 0)):
        product = made_by(multiple.inputs[matmul], "MatMul")
        rounded = None if product is None else made_by(product.inputs[0], "DequantizeLinear")
        quantize = None if rounded is None else made_by(rounded.inputs[0], "QuantizeLinear")
        division = None if quantize is None else made_by(quantize.inputs[0], "Div")
        if quantize is None or division is None or constant_number(quantize.inputs[1]) != 1:
            continue
        if division.inputs[0] is scaled and division.inputs[1] is multiple.inputs[token]:
            return product
    return None
