"""The passes that every traced piece goes through: each leaves a valid graph that computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from kvgraph.export.passes.canonicalize import canonicalize
from kvgraph.export.passes.static_reshape import make_reshapes_static

X = np.arange(2 * 3 * 8, dtype=np.float32).reshape(2, 3, 8)


def parse(body: str, output: str, constants: str = "") -> ir.Model:
    """A graph with the input x [B, S, 8] and the output y, with every shape inferred."""
    text = f"""
        <ir_version: 10, opset_import: ["" : 24]>
        piece (float[B, S, 8] x) => (float[{output}] y)
        <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] last = {{-1}}, int64[1] four = {{4}}{constants}>
        {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return ir.from_proto(onnx.shape_inference.infer_shapes(model, data_prop=True))


def run(model: ir.Model, feeds: dict[str, Any] | None = None) -> np.ndarray:
    data = ir.to_proto(model).SerializeToString()
    onnx.checker.check_model(data, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Level 0: what is compared is the graph, not what an optimizer makes of it.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(data, options).run(None, feeds or {"x": X})[0]


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def targets(model: ir.Model) -> list[list[int]]:
    """The constant targets of the graph's Reshapes."""
    reshapes = [node for node in model.graph if node.op_type == "Reshape"]
    tensors = [ir.convenience.get_const_tensor(node.inputs[1]) for node in reshapes]
    return [tensor.numpy().tolist() for tensor in tensors if tensor is not None]


def set_shape(model: ir.Model, name: str, *dims: int | str | None) -> None:
    """Record the shape that a trace knows of a value."""
    value = next(value for node in model.graph for value in node.outputs if value.name == name)
    value.shape = ir.Shape(dims)


# [B, S, 8] -> [B, S, 2, 4] as a trace writes it: the target gathered from the input's own shape.
SPLIT = """
    s = Shape(x)
    b = Slice(s, zero, one)
    n = Slice(s, one, two)
    target = Concat<axis=0>(b, n, last, four)
    y = Reshape<allowzero=1>(x, target)
"""
SPLIT_OUTPUT, TWO = "B, S, 2, 4", ", int64[1] two = {2}"


def test_computed_target_becomes_a_constant_that_copies_and_infers() -> None:
    model = parse(SPLIT, SPLIT_OUTPUT, TWO)
    set_shape(model, "y", "B", "S", 2, 4)
    before = run(model)
    assert make_reshapes_static(model)
    assert targets(model) == [[0, 0, 2, 4]]
    np.testing.assert_array_equal(run(model), before)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 3), (5, 1)])
def test_constant_target_fits_every_size_of_the_symbols(sizes: tuple[int, int]) -> None:
    model = parse(SPLIT, SPLIT_OUTPUT, TWO)
    set_shape(model, "y", "B", "S", 2, 4)
    make_reshapes_static(model)
    x = np.random.default_rng(0).standard_normal((*sizes, 8)).astype(np.float32)
    np.testing.assert_array_equal(run(model, {"x": x}), x.reshape(*sizes, 2, 4))


def test_one_symbol_at_another_place_is_inferred() -> None:
    model = parse(
        "target = Concat<axis=0>(last, eight) y = Reshape(x, target)", "R, 8", ", int64[1] eight = {8}"
    )
    set_shape(model, "y", None, 8)
    assert make_reshapes_static(model)
    assert targets(model) == [[-1, 8]]
    np.testing.assert_array_equal(run(model), X.reshape(-1, 8))


def test_two_symbols_at_other_places_are_left_alone() -> None:
    body = """
        s = Shape(x)
        b = Slice(s, zero, one)
        n = Slice(s, one, two)
        target = Concat<axis=0>(four, n, b, last)
        y = Reshape(x, target)
    """
    model = parse(body, "4, P, Q, R", TWO)
    set_shape(model, "y", 4, "P", "Q", "R")
    assert not make_reshapes_static(model)
    assert targets(model) == []
    assert run(model).shape == (4, 3, 2, 2)


def test_dimension_of_zero_is_left_alone() -> None:
    model = parse("y = Reshape<allowzero=1>(x, target)", "0, B", ", int64[2] target = {0, 5}")
    set_shape(model, "y", 0, "B")
    assert not make_reshapes_static(model)


def test_unknown_shape_is_left_alone() -> None:
    model = parse(SPLIT, SPLIT_OUTPUT, TWO)
    reshape = next(node for node in model.graph if node.op_type == "Reshape")
    reshape.outputs[0].shape = None
    assert not make_reshapes_static(model)


def test_static_target_is_done_once() -> None:
    model = parse(SPLIT, SPLIT_OUTPUT, TWO)
    set_shape(model, "y", "B", "S", 2, 4)
    assert make_reshapes_static(model)
    assert not make_reshapes_static(model)


def test_reshape_of_another_domain_is_left_alone() -> None:
    model = parse(SPLIT, SPLIT_OUTPUT, TWO)
    set_shape(model, "y", "B", "S", 2, 4)
    next(node for node in model.graph if node.op_type == "Reshape").domain = "vendor"
    assert not make_reshapes_static(model)


def test_canonical_piece_has_neither_shape_arithmetic_nor_identities() -> None:
    body = """
        same = Identity(x)
        s = Shape(same)
        b = Slice(s, zero, one)
        n = Slice(s, one, two)
        two_again = Add(one, one)
        target = Concat<axis=0>(b, n, two_again, four)
        unused = Neg(same)
        r = Reshape(same, target)
        y = Identity(r)
    """
    model = parse(body, SPLIT_OUTPUT, TWO)
    set_shape(model, "r", "B", "S", 2, 4)
    set_shape(model, "y", "B", "S", 2, 4)
    before = run(model)
    make_constants(model)
    assert canonicalize(model.graph)
    assert operators(model) == ["Reshape"]
    assert targets(model) == [[0, 0, 2, 4]]
    np.testing.assert_array_equal(run(model), before)


def make_constants(model: ir.Model) -> None:
    """Turn initializers into Constant nodes, as a trace has them: its initializers are parameters."""
    for name, value in list(model.graph.initializers.items()):
        assert value.const_value is not None
        node = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", value.const_value)], name=f"constant {name}"
        )
        node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = name, value.dtype, value.shape
        del model.graph.initializers[name]
        ir.convenience.replace_all_uses_with(value, node.outputs[0])
        model.graph.insert_before(model.graph[0], node)


def test_canonical_piece_keeps_its_parameters_without_their_values() -> None:
    model = parse("p = Mul(x, weight) q = Mul(x, weight) y = Add(p, q)", "B, S, 8", ", float[1] weight = {3}")
    make_constants_of_all_but(model, "weight")
    canonicalize(model.graph)
    assert [name for name, value in model.graph.initializers.items() if value.const_value is None] == [
        "weight"
    ]
    # Equal products are one product.
    assert operators(model) == ["Mul", "Add"]
    model.graph.initializers["weight"].const_value = ir.tensor(np.array([3], np.float32), name="weight")
    np.testing.assert_array_equal(run(model), 6 * X)


def make_constants_of_all_but(model: ir.Model, name: str) -> None:
    kept = model.graph.initializers.pop(name)
    make_constants(model)
    model.graph.register_initializer(kept)


def test_canonical_piece_carries_no_notes_of_the_tracer() -> None:
    model = parse("y = Neg(x)", "B, S, 8")
    node = next(iter(model.graph))
    node.metadata_props["pkg.torch.onnx.stack_trace"] = "File /somewhere/model.py"
    node.doc_string = "made by a tracer"
    canonicalize(model.graph)
    assert not node.metadata_props
    assert not node.doc_string


def test_canonical_piece_is_left_as_it_is() -> None:
    model = parse("z = Neg(x) y = Abs(z)", "B, S, 8")
    model.graph.initializers.clear()
    assert not canonicalize(model.graph)
    np.testing.assert_array_equal(run(model), np.abs(X))
