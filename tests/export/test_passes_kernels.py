"""The passes that lower graphs to the operators of kvgraph's CPU kernels: what they match, and what they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, GraphName
from kvgraph.export.packed.target_weights import TargetWeights
from kvgraph.export.passes.fuse_cached_attention import fuse_cached_attention
from kvgraph.export.passes.match_mask import match_window
from kvgraph.export.passes.remove_casts import remove_casts
from kvgraph.export.targets.ort_cpu_graph import lower_to_kernels
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

# float32 sums in another order, on logits of up to 10.
TOLERANCE = 1e-4
RNG = np.random.default_rng(11)

Compare = Callable[[str, dict[str, Any]], Counter[str]]


@pytest.fixture
def compare(packed_reference: ModuleType, tmp_path: Path) -> Compare:
    """Lowers a graph of x [B, S, 8] with some constants, checks that y is the same, and counts the operators."""

    def run(body: str, constants: dict[str, Any]) -> Counter[str]:
        text = f"""<ir_version: 11, opset_import: ["" : 24]>
            g (float[B, S, 8] x) => (float[B, S, M] y) {{ {body} }}"""
        proto = onnx.parser.parse_model(text)
        for name, array in constants.items():
            proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
        for node in proto.graph.node:
            node.name = f"{node.op_type}_{node.output[0]}"
        proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
        x = RNG.standard_normal((2, 3, 8)).astype(np.float32)
        expected = ReferenceEvaluator(proto).run(None, {"x": x})[0]
        model = lower_to_kernels(ir.from_proto(proto))
        weights = TargetWeights([model])
        weights.place()
        weights.write(tmp_path / WEIGHTS_FILE)
        (tmp_path / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
        evaluator = packed_reference.evaluator(tmp_path / "g.onnx")
        np.testing.assert_allclose(evaluator.run(None, {"x": x})[0], expected, rtol=1e-5, atol=1e-5)
        return Counter(node.op_type for node in model.graph)

    return run


def floats(*shape: int) -> Floats:
    return RNG.standard_normal(shape).astype(np.float32)


ACTIVATIONS = {
    "silu": "s = Sigmoid(g) a = Mul(g, s)",
    "silu the other way": "s = Sigmoid(g) a = Mul(s, g)",
    "gelu": "a = Gelu(g)",
    "gelu_tanh": 'a = Gelu<approximate = "tanh">(g)',
    "relu": "a = Relu(g)",
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", ["neither", "gate", "both"])
def test_gate_and_up_become_one_product(activation: str, biased: str, compare: Compare) -> None:
    gate = "g = MatMul(x, wg)" if biased == "neither" else "p = MatMul(x, wg) g = Add(bg, p)"
    up = "q = MatMul(x, wu) u = Add(q, bu)" if biased == "both" else "u = MatMul(x, wu)"
    constants = {"wg": floats(8, 20), "wu": floats(8, 20), "bg": floats(20), "bu": floats(20)}
    found = compare(f"{gate} {ACTIVATIONS[activation]} {up} y = Mul(u, a)", constants)
    assert found == {"PackedLinear": 1}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_plain_activation_joins_its_product_after_the_bias(activation: str, compare: Compare) -> None:
    body = f"p = MatMul(x, w) g = Add(p, b) {ACTIVATIONS[activation]} y = MatMul(a, v)"
    assert compare(body, {"w": floats(8, 20), "b": floats(20), "v": floats(20, 6)}) == {"PackedLinear": 2}


def test_a_residual_joins_the_product_that_it_is_added_to(compare: Compare) -> None:
    body = "p = MatMul(x, w) b1 = Add(p, b) y = Add(x, b1)"
    assert compare(body, {"w": floats(8, 8), "b": floats(8)}) == {"PackedLinear": 1}


@pytest.mark.parametrize(
    ("body", "expected"),
    {
        "somebody else reads the product": (
            "p = MatMul(x, w) r = Add(x, p) y = Mul(r, p)",
            {"PackedLinear": 1, "Add": 1, "Mul": 1},
        ),
        "somebody else reads the gate": (
            "g = MatMul(x, w) a = Relu(g) u = MatMul(x, v) m = Mul(a, u) y = Add(m, g)",
            {"PackedLinear": 2, "Relu": 1, "Mul": 1, "Add": 1},
        ),
        "gate and up have two inputs": (
            "h = Neg(x) g = MatMul(x, w) a = Relu(g) u = MatMul(h, v) y = Mul(a, u)",
            {"PackedLinear": 2, "Neg": 1, "Mul": 1},
        ),
        "the sum is broadcast": (
            "p = MatMul(x, w) y = Add(p, row)",
            {"PackedLinear": 1, "Add": 1},
        ),
        "the weight is not constant": (
            "t = Transpose<perm = [0, 2, 1]>(x) p = MatMul(t, x) y = MatMul(x, p)",
            None,
        ),
        "an alpha": ("f = Reshape(x, flat) p = Gemm<alpha = 2.0>(f, w) y = Reshape(p, back)", None),
    }.values(),
    ids=lambda value: None,
)
def test_what_does_not_fit_stays(body: str, expected: dict[str, int] | None, compare: Compare) -> None:
    constants = {"w": floats(8, 8), "v": floats(8, 8), "row": floats(1, 1, 8)}
    constants |= {"flat": np.array([-1, 8]), "back": np.array([2, 3, 8])}
    found = compare(body, constants)
    assert found == expected if expected is not None else "PackedLinear" not in found


def test_a_product_over_rows_keeps_its_rank() -> None:
    model = ir.from_onnx_text("""<ir_version: 11, opset_import: ["" : 24]>
        g (float[B, N, 8] x) => (float[B, N, 2] y)
        <float[2, 8] table = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
         int64[2] rows = {-1, 8}, int64[3] back = {0, -1, 2}, float[R, 8] f, float[R, 2] h>
        { f = Reshape(x, rows) h = Gemm<transB = 1>(f, table) y = Reshape(h, back) }""")
    assert Counter(node.op_type for node in lower_to_kernels(model).graph) == {"PackedLinear": 1}


def test_casts_that_do_nothing_go_and_outputs_keep_their_names() -> None:
    model = ir.from_onnx_text("""<ir_version: 11, opset_import: ["" : 24]>
        g (float[N] x) => (float[N] y)
        { a = Cast<to = 1>(x) b = Neg(a) c = Cast<to = 10>(b) d = Cast<to = 1>(c) e = Neg(d) y = Cast<to = 1>(e) }""")
    common.ShapeInferencePass()(model)
    assert remove_casts(model)
    assert [node.op_type for node in model.graph] == ["Neg", "Cast", "Cast", "Neg"]
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert not remove_casts(model)


MASKS = {
    "causal": ("y = LessOrEqual(slots, q)", 0),
    "a window": ("a = LessOrEqual(slots, q) s = Sub(q, five) b = Greater(slots, s) y = And(a, b)", 5),
    "a window, first": ("a = LessOrEqual(slots, q) s = Sub(q, five) b = Greater(slots, s) y = And(b, a)", 5),
    "strictly causal": ("y = Less(slots, q)", None),
    "the other way": ("y = LessOrEqual(q, slots)", None),
    "no causal half": ("s = Sub(q, five) b = Greater(slots, s) y = And(b, b)", None),
    "a shifted window": (
        "a = LessOrEqual(slots, q) s = Sub(q, five) r = Sub(s, five) b = Greater(slots, r) y = And(a, b)",
        None,
    ),
    "slots that begin at 5": ("m = Add(slots, five) y = LessOrEqual(m, q)", None),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_told_by_their_structure(name: str) -> None:
    body, window = MASKS[name]
    model = ir.from_onnx_text(f"""<ir_version: 11, opset_import: ["" : 24]>
        g (int64[B, S] input_ids, int64[B] past_length, float[B, 2, T, 4] cache) => (bool[B, 1, S, T] y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64 five = {{5}}, int64[1] first = {{1}}, int64[1] last = {{-1}}>
        {{
            capacity = Shape<start = 2, end = 3>(cache)
            t = Squeeze(capacity)
            slots = Range(zero, t, one)
            length = Shape<start = 1, end = 2>(input_ids)
            n = Squeeze(length)
            steps = Range(zero, n, one)
            past = Unsqueeze(past_length, first)
            positions = Add(past, steps)
            heads = Unsqueeze(positions, first)
            q = Unsqueeze(heads, last)
            {body}
        }}""")
    cache = model.graph.inputs[2]
    assert match_window(model.graph.outputs[0], cache) == window


@pytest.fixture(scope="session")
def llama(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    return exported(tiny_llama(tie_word_embeddings=True), dtype="float32")


def test_a_whole_model_is_what_the_description_of_the_operators_says(
    llama: Bundle,
    packed_reference: ModuleType,
    ragged: Callable[..., Floats],
    random_ids: Callable[..., Ids],
    tmp_path: Path,
) -> None:
    models = {graph: lower_to_kernels(ir.load(llama.graph_path(graph))) for graph in GRAPHS}
    weights = TargetWeights(list(models.values()))
    weights.place()
    weights.write(tmp_path / WEIGHTS_FILE)
    files: dict[GraphName, Path] = {graph: tmp_path / f"{graph}.onnx" for graph in models}
    for graph, model in models.items():
        files[graph].write_bytes(ir.to_proto(model).SerializeToString())
    ids = random_ids(2, 16)
    found = ragged(packed_reference.ReferenceSession(files, llama.contract), ids, [9, 4], 6)
    expected = ragged(OrtSession(llama, threads=1), ids, [9, 4], 6)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def change_value_norm(graph: ir.Graph) -> None:
    """Rotates values, too."""
    scatter = graph.outputs[2].producer()
    assert scatter is not None
    rotation = next(node for node in graph if node.op_type == "RotaryEmbedding")
    node = ir.Node(
        "", "RotaryEmbedding", [scatter.inputs[1], *rotation.inputs[1:]], name="extra", num_outputs=1
    )
    graph.insert_before(scatter, node)
    scatter.replace_input_with(1, node.outputs[0])


def change_reader(graph: ir.Graph) -> None:
    """Lets something else read the written keys."""
    present = graph.outputs[1]
    node = ir.Node("", "Neg", [present], name="extra", num_outputs=1)
    node.outputs[0].name = "extra"
    graph.append(node)
    graph.outputs.append(node.outputs[0])


def change_base(graph: ir.Graph) -> None:
    """Rotates keys by other angles than queries."""
    query, key = [node for node in graph if node.op_type == "RotaryEmbedding"][:2]
    key.replace_input_with(1, query.inputs[2])


@pytest.mark.parametrize("change", [change_value_norm, change_reader, change_base])
def test_attention_in_another_form_stays(change: Callable[[ir.Graph], None], llama: Bundle) -> None:
    model = ir.load(llama.graph_path("prefill"))
    change(model.graph)
    # The first of two layers was changed.
    assert fuse_cached_attention(model)
    counts = Counter(node.op_type for node in model.graph)
    assert counts["CachedAttention"] == 1
