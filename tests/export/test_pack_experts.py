"""Experts in kvgraph's CPU kernels: which graphs become one operator, what it reads, and what stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.packed.target_weights import TargetWeights
from kvgraph.export.passes.expert_patterns import ACTIVATIONS
from kvgraph.export.passes.match_pattern import match_pattern
from kvgraph.export.passes.pack_experts import pack_experts
from kvgraph.export.targets.ort_cpu_graph import lower_to_kernels
from kvgraph.export.trace import Argument, trace
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.models.experts import Experts, ExpertsMLP, Router
from kvgraph.models.layers import Precision
from kvgraph.runtime.session import Session

# float32 sums in another order.
TOLERANCE = 1e-5
EXPERTS, TOP_K, HIDDEN, SIZE = 9, 2, 20, 12
FLOAT32 = Precision(torch.float32, torch.float32)
HF_NAMES = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}

Trace = Callable[..., tuple[ExpertsMLP, ir.Model]]


@pytest.fixture(scope="module")
def traced() -> Trace:
    """`traced(form, activation, normalized)`: a layer with experts in one of their forms, and its graph."""

    def make(form: str, act: str = "silu", normalized: bool = True) -> tuple[ExpertsMLP, ir.Model]:
        torch.manual_seed(3)
        experts = Experts(EXPERTS, HIDDEN, SIZE, HF_NAMES[act], FLOAT32)
        layer = ExpertsMLP(Router(HIDDEN, EXPERTS, TOP_K, normalized), experts)
        layer._form = lambda new_tokens: getattr(experts, form)  # type: ignore[method-assign] # the form is asked for
        for parameter in layer.parameters():
            parameter.requires_grad_(False).normal_().div_(parameter.shape[-2] ** 0.5)
        graph = trace(layer, [Argument("x", torch.float32, ("B", 1 if form == "gathered" else "S", HIDDEN))])
        for name, value in graph.initializers.items():
            if value.const_value is None:
                weight = layer.get_parameter(name.removeprefix("traced."))
                value.const_value = ir.tensor(weight.numpy(), name=name)
        graph.inputs[0].name = "x"
        return layer, ir.Model(graph, ir_version=10)

    return make


FORMS = ["gathered", "everywhere", "grouped"]
# Activations are the same in every form.
CASES = [(form, "silu", normalized) for form in FORMS for normalized in (True, False)]
CASES += [("everywhere", act, True) for act in ACTIVATIONS if act != "silu"]


@pytest.mark.parametrize(("form", "act", "normalized"), CASES)
def test_every_form_becomes_one_operator(
    form: str, act: str, normalized: bool, traced: Trace, packed_reference: ModuleType, tmp_path: Path
) -> None:
    layer, model = traced(form, act, normalized)
    assert lower_to_kernels(model)
    counts = Counter(node.op_type for node in model.graph)
    assert counts == {"PackedLinear": 1, "TopK": 1, "Softmax": 1, "PackedExperts": 1}
    weights = TargetWeights([model])
    weights.place()
    weights.write(tmp_path / WEIGHTS_FILE)
    (tmp_path / "g.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    x = np.random.default_rng(4).standard_normal((3, 1 if form == "gathered" else 5, HIDDEN), np.float32)
    found = packed_reference.evaluator(tmp_path / "g.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(found, layer(torch.from_numpy(x)).numpy(), rtol=0, atol=TOLERANCE)


def change_constant(graph: ir.Graph) -> None:
    """Counts experts in another order."""
    (numbers,) = (
        value
        for value in graph.initializers.values()
        if value.const_value is not None and value.const_value.size == EXPERTS
    )
    numbers.const_value = ir.tensor(np.arange(EXPERTS)[::-1].copy(), name=numbers.name)


def change_attribute(graph: ir.Graph) -> None:
    """Adds over another axis."""
    last = [node for node in graph if node.op_type == "ReduceSum"][-1]
    last.attributes["keepdims"] = ir.AttrInt64("keepdims", 1)


def change_weight(graph: ir.Graph) -> None:
    """Uses a weight that is computed."""
    up = next(value for name, value in graph.initializers.items() if "up_proj" in name)
    (use,) = up.uses()
    node = ir.Node("", "Neg", [up], num_outputs=1)
    node.outputs[0].type, node.outputs[0].shape = up.type, up.shape
    graph.insert_before(use.node, node)
    use.node.replace_input_with(use.idx, node.outputs[0])


def change_input(graph: ir.Graph) -> None:
    """Gives gate and up two inputs."""
    products = [node for node in graph if node.op_type == "MatMul" and len(node.outputs[0].shape or ()) == 3]
    node = ir.Node("", "Neg", [products[0].inputs[0]], num_outputs=1)
    node.outputs[0].type, node.outputs[0].shape = products[0].inputs[0].type, products[0].inputs[0].shape
    graph.insert_before(products[0], node)
    products[1].replace_input_with(0, node.outputs[0])


@pytest.mark.parametrize("change", [change_constant, change_attribute, change_weight, change_input])
def test_experts_in_another_form_stay(change: Callable[[ir.Graph], None], traced: Trace) -> None:
    _, model = traced("everywhere")
    change(model.graph)
    assert not pack_experts(model)


def test_a_router_that_works_along_another_axis_keeps_its_rows(traced: Trace) -> None:
    _, model = traced("everywhere", normalized=False)
    softmax = next(node for node in model.graph if node.op_type == "Softmax")
    softmax.attributes["axis"] = ir.AttrInt64("axis", 0)
    assert pack_experts(model)
    router = next(node for node in model.graph if node.op_type == "MatMul")
    assert router.inputs[0].producer().op_type == "Reshape"
    experts = next(node for node in model.graph if node.op_type == "PackedExperts")
    assert experts.inputs[0].name == "x"


PATTERN = """<ir_version: 11, opset_import: ["" : 24]>
    g (float x, float w) => (float y) <float two = {2}> { a = Mul(x, two) b = Add(a, w) y = Softmax<axis = 1>(b) }"""


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ("a = Mul(p, c) b = Add(a, q) y = Softmax<axis = 1>(b)", True),
        ("a = Mul(c, p) b = Add(q, a) y = Softmax<axis = 1>(b)", True),
        ("a = Mul(p, c) b = Add(a, q) y = Softmax(b)", False),
        ("a = Mul(p, d) b = Add(a, q) y = Softmax<axis = 1>(b)", False),
        ("a = Div(p, c) b = Add(a, q) y = Softmax<axis = 1>(b)", False),
        ("b = Add(p, q) y = Softmax<axis = 1>(b)", False),
    ],
)
def test_a_pattern_is_matched_by_structure(body: str, fits: bool) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 11, opset_import: ["" : 24]> g (float[N, M] p, float[N, M] q) => (float[N, M] y)'
        f"<float c = {{2}}, float d = {{3}}> {{ {body} }}"
    )
    found = match_pattern(ir.from_onnx_text(PATTERN).graph, model.graph.outputs[0])
    if fits:
        assert found == {"x": model.graph.inputs[0], "w": model.graph.inputs[1]}
    else:
        assert found is None


NODES_A_LAYER = 9


def test_a_layer_has_nine_nodes_and_one_graph_serves_both(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    kernels: Callable[[Bundle], Session],
) -> None:
    bundle = exported(tiny_checkpoint("mixtral", num_local_experts=5, num_experts_per_tok=2))
    kernels(bundle)
    folder = bundle.target_path("ort-cpu")
    assert sorted(path.name for path in folder.glob("*.onnx")) == ["prefill.onnx"]
    graph = onnx.load(folder / "prefill.onnx", load_external_data=False).graph
    in_layers = [node for node in graph.node if node.name.startswith("layers.1/")]
    assert len(in_layers) == NODES_A_LAYER
    # The experts add the residual.
    assert not {"Add", "Where", "Reshape", "Concat"} & {node.op_type for node in in_layers}
    for role in GRAPHS:
        counts = Counter(node.op_type for node in lower_to_kernels(ir.load(bundle.graph_path(role))).graph)
        assert counts["PackedExperts"] == 2


def test_scales_of_float16_products_are_left_out(
    tiny_checkpoint: Callable[..., Path], exported: Callable[..., Bundle]
) -> None:
    """Experts in float16 with a float32 residual stream divide the inner values by a power of two of each row."""
    bundle = exported(
        tiny_checkpoint("mixtral", num_local_experts=5, num_experts_per_tok=2),
        dtype="float16",
        residual_dtype="float32",
    )
    for role in GRAPHS:
        counts = Counter(node.op_type for node in lower_to_kernels(ir.load(bundle.graph_path(role))).graph)
        assert counts["PackedExperts"] == 2
        assert counts["Pow"] == 0
