from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest

from kvgraph.export.contract import CONTEXT_LENGTH, Contract, scatter_state
from kvgraph.export.passes.bind_capacity import bind_capacity
from kvgraph.export.passes.lower_attention import lower_attention
from kvgraph.export.passes.slice_cache import slice_cache

# The same sums in another order; float16 rounds the scores before the softmax where the operator does not.
FLOAT32_TOLERANCE = 2e-6
FLOAT16_TOLERANCE = 4e-3

ONNX_TYPES = {"float32": "float", "float16": "float16"}
HEADS, BATCH, NEW, SLOTS, USED = 4, 3, 2, 16, 5

SYMBOLIC_SLOTS = "t = Shape<start=2, end=3>(past_k) t0 = Squeeze(t) slots = Range(zero, t0, one)"
CONSTANT_SLOTS = (
    "slots = Constant<value = int64[16] {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}>()"
)


def cached_attention(
    dtype: str = "float32",
    kv_heads: int = 2,
    head_dim: int = 8,
    attributes: str = "",
    slots: str = SYMBOLIC_SLOTS,
) -> ir.Model:
    """One layer's attention as the contract has it: scatter, mask from past_length, Attention over the buffer."""
    kind = ONNX_TYPES[dtype]
    capacity = "16" if slots == CONSTANT_SLOTS else "T"
    query, new = f"{kind}[B, {HEADS}, S, {head_dim}]", f"{kind}[B, {kv_heads}, S, {head_dim}]"
    cache = f"{kind}[B, {kv_heads}, {capacity}, {head_dim}]"
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 24]>
        layer ({query} q, {new} k, {new} v, int64[B] past_length, {cache} past_k, {cache} past_v)
            => ({query} y, {cache} present_k, {cache} present_v)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] axis1 = {{1}}, int64[2] axes = {{1, 3}}>
        {{
            s = Shape<start=2, end=3>(q)
            s0 = Squeeze(s)
            offsets = Range(zero, s0, one)
            first = Unsqueeze(past_length, axis1)
            positions = Add(first, offsets)
            {slots}
            query_positions = Unsqueeze(positions, axes)
            mask = LessOrEqual(slots, query_positions)
            present_k = TensorScatter<axis=2>(past_k, k, past_length)
            present_v = TensorScatter<axis=2>(past_v, v, past_length)
            y = Attention<scale=0.25{attributes}>(q, present_k, present_v, mask)
        }}""")
    rename(model.graph)
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def rename(graph: onnx.GraphProto) -> None:
    """The contract's names, which the text form cannot spell."""
    names = {"past_k": "past_key_values.0.key", "past_v": "past_key_values.0.value"}
    names |= {"present_k": "present.0.key", "present_v": "present.0.value"}
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def contract(
    dtype: str = "float32", kv_heads: int = 2, head_dim: int = 8, capacity: int | None = None
) -> Contract:
    return Contract(97, 1, 64, False, scatter_state([(kv_heads, head_dim)], dtype, capacity))


def inputs(dtype: str = "float32", kv_heads: int = 2, head_dim: int = 8) -> dict[str, Any]:
    random = np.random.default_rng(3)

    def floats(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(dtype)

    cache = [floats(BATCH, kv_heads, SLOTS, head_dim) for _ in range(2)]
    return {
        "q": floats(BATCH, HEADS, NEW, head_dim),
        "k": floats(BATCH, kv_heads, NEW, head_dim),
        "v": floats(BATCH, kv_heads, NEW, head_dim),
        "past_length": np.array([USED, 0, 1]),
        "past_key_values.0.key": cache[0],
        "past_key_values.0.value": cache[1],
    }


def run(model: ir.Model, feeds: dict[str, Any]) -> list[np.ndarray]:
    """The model's outputs on ONNX Runtime, after the checker with full shape inference."""
    data = ir.to_proto(model).SerializeToString()
    onnx.checker.check_model(data, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Level 0: what is compared is the graph, not what an optimizer makes of it.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(data, options).run(None, feeds)


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def symbols(model: ir.Model) -> set[str | None]:
    """Symbolic dimensions of every value of the graph."""
    values = [*model.graph.inputs, *(value for node in model.graph for value in node.outputs)]
    return {
        dim.value for value in values if value.shape for dim in value.shape if isinstance(dim, ir.SymbolicDim)
    }


def test_bind_capacity_writes_the_number_wherever_a_shape_says_t() -> None:
    model, feeds = cached_attention(), inputs()
    before = run(model, feeds)
    assert bind_capacity(model, contract(), SLOTS)
    shapes = {value.name: value.shape for value in (*model.graph.inputs, *model.graph.outputs)}
    assert shapes["past_key_values.0.key"][2] == SLOTS
    assert shapes["present.0.value"][2] == SLOTS
    assert "T" not in symbols(model)
    for left, right in zip(before, run(model, feeds), strict=True):
        np.testing.assert_array_equal(left, right)


def test_bind_capacity_changes_nothing_that_is_bound() -> None:
    model = cached_attention()
    bind_capacity(model, contract(), SLOTS)
    assert not bind_capacity(model, contract(), SLOTS)


def test_bind_capacity_refuses_another_number() -> None:
    model = cached_attention()
    bind_capacity(model, contract(), SLOTS)
    with pytest.raises(
        ValueError, match=r"capacity of 16 written in, 32 is asked for; build with --max-context 16"
    ):
        bind_capacity(model, contract(), 32)


@pytest.mark.parametrize("slots", [SYMBOLIC_SLOTS, CONSTANT_SLOTS], ids=["symbolic", "constant"])
@pytest.mark.parametrize("context", [USED + NEW, USED + NEW + 1, SLOTS])
def test_slice_cache_computes_the_same_at_every_context_that_holds_the_tokens(
    slots: str, context: int
) -> None:
    model, feeds = cached_attention(slots=slots), inputs()
    before = run(model, feeds)
    assert slice_cache(model, contract(capacity=SLOTS if slots == CONSTANT_SLOTS else None))
    after = run(model, {**feeds, CONTEXT_LENGTH: np.array([context])})
    np.testing.assert_allclose(after[0], before[0], atol=FLOAT32_TOLERANCE)
    for left, right in zip(before[1:], after[1:], strict=True):
        np.testing.assert_array_equal(left, right)


def test_slice_cache_makes_attention_read_no_slot_past_the_context() -> None:
    model, feeds = cached_attention(), inputs()
    slice_cache(model, contract())
    poisoned = feeds["past_key_values.0.value"]
    poisoned[:, :, USED + NEW :] = np.nan
    result = run(model, {**feeds, CONTEXT_LENGTH: np.array([USED + NEW])})[0]
    assert np.isfinite(result).all()


def test_slice_cache_leaves_no_reader_of_the_capacity() -> None:
    model = cached_attention()
    slice_cache(model, contract())
    assert operators(model).count("Slice") == 2
    assert [node.inputs[0].name for node in model.graph if node.op_type == "Shape"] == ["q"]


def test_slice_cache_is_done_once() -> None:
    model = cached_attention()
    assert slice_cache(model, contract())
    assert not slice_cache(model, contract())


def test_slice_cache_refuses_a_shape_it_cannot_split() -> None:
    slots = "t = Shape<start=1, end=3>(past_k) t0 = ReduceMax<keepdims=0>(t) slots = Range(zero, t0, one)"
    with pytest.raises(
        ValueError, match=r"node 'Shape_t' takes dimensions 1 to 2 of 'past_key_values.0.key' together"
    ):
        slice_cache(cached_attention(slots=slots), contract())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [10, 12, 20])
def test_lower_attention_computes_the_same_at_head_sizes_without_a_kernel(
    kv_heads: int, head_dim: int
) -> None:
    model, feeds = cached_attention("float16", kv_heads, head_dim), inputs("float16", kv_heads, head_dim)
    before = run(model, feeds)
    assert lower_attention(model)
    assert "Attention" not in operators(model)
    np.testing.assert_allclose(run(model, feeds)[0], before[0], atol=FLOAT16_TOLERANCE)


@pytest.mark.parametrize("attributes", [", softcap=0.5", ", softmax_precision=1"])
def test_lower_attention_writes_out_what_tensorrt_rejects(attributes: str) -> None:
    model, feeds = cached_attention(attributes=attributes), inputs()
    before = run(model, feeds)
    assert lower_attention(model)
    np.testing.assert_allclose(run(model, feeds)[0], before[0], atol=FLOAT32_TOLERANCE)


def test_lower_attention_works_on_a_sliced_cache() -> None:
    model, feeds = cached_attention("float16", head_dim=12), inputs("float16", head_dim=12)
    before = run(model, feeds)
    assert slice_cache(model, contract("float16", head_dim=12))
    assert lower_attention(model)
    after = run(model, {**feeds, CONTEXT_LENGTH: np.array([USED + NEW])})
    np.testing.assert_allclose(after[0], before[0], atol=FLOAT16_TOLERANCE)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_lower_attention_adds_a_float_mask(kv_heads: int) -> None:
    model, feeds = (
        with_float_mask(cached_attention(kv_heads=kv_heads, attributes=", softcap=0.5")),
        inputs(kv_heads=kv_heads),
    )
    before = run(model, feeds)
    assert lower_attention(model)
    np.testing.assert_allclose(run(model, feeds)[0], before[0], atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_lower_attention_takes_a_mask_for_each_query_head(kv_heads: int) -> None:
    model = with_float_mask(cached_attention(kv_heads=kv_heads, attributes=", softcap=0.5"))
    attention = next(node for node in model.graph if node.op_type == "Attention")
    slopes = ir.tensor(np.linspace(0.1, 2, HEADS, dtype=np.float32).reshape(1, HEADS, 1, 1), name="slopes")
    model.graph.initializers["slopes"] = ir.Value(
        name="slopes", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(slopes.shape), const_value=slopes
    )
    scaled = ir.Node("", "Mul", [attention.inputs[3], model.graph.initializers["slopes"]], name="by_head")
    scaled.outputs[0].name, scaled.outputs[0].type = "by_head", ir.TensorType(ir.DataType.FLOAT)
    scaled.outputs[0].shape = ir.Shape(["B", HEADS, "S", None])
    model.graph.insert_before(attention, scaled)
    attention.replace_input_with(3, scaled.outputs[0])
    feeds = inputs(kv_heads=kv_heads)
    before = run(model, feeds)
    assert lower_attention(model)
    np.testing.assert_allclose(run(model, feeds)[0], before[0], atol=FLOAT32_TOLERANCE)


def with_float_mask(model: ir.Model) -> ir.Model:
    """The same mask as numbers that are added to the scores."""
    attention = next(node for node in model.graph if node.op_type == "Attention")
    mask = attention.inputs[3]
    assert mask is not None
    numbers = ir.Node("", "Cast", [mask], [ir.AttrInt64("to", 1)], name="numbers")
    numbers.outputs[0].name, numbers.outputs[0].shape = "numbers", mask.shape
    numbers.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.insert_before(attention, numbers)
    attention.replace_input_with(3, numbers.outputs[0])
    return model


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 10), ("float16", 8), ("float16", 64)])
def test_lower_attention_keeps_what_tensorrt_builds(dtype: str, head_dim: int) -> None:
    model = cached_attention(dtype, head_dim=head_dim)
    assert not lower_attention(model)
    assert "Attention" in operators(model)


def test_lower_attention_refuses_lengths_that_tensorrt_ignores() -> None:
    model = cached_attention()
    attention = next(node for node in model.graph if node.op_type == "Attention")
    attention.resize_inputs(7)
    attention.replace_input_with(6, model.graph.inputs[3])
    with pytest.raises(
        ValueError, match=r"node 'Attention_y' \(Attention\) has a past or per-row lengths as inputs"
    ):
        lower_attention(model)


def test_lower_attention_refuses_is_causal() -> None:
    with pytest.raises(ValueError, match="has is_causal, which TensorRT rejects or ignores"):
        lower_attention(cached_attention(attributes=", is_causal=1"))
