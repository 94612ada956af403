"""What the two graphs are made of: names, types, shapes and operators, at every choice of `kvgraph export`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import pytest
from onnx import TensorProto

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, GraphName, TensorSpec, hidden_state

# What `kvgraph export` may be asked for, and which float types its choice puts into weights and residual stream.
EXPORTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "float32": ({}, "float32", "float32"),
    "capacity": ({"capacity": 48, "debug_outputs": True}, "float32", "float32"),
    "float16": ({"dtype": "float16"}, "float16", "float16"),
    "float32 residual": ({"dtype": "float16", "residual_dtype": "float32"}, "float16", "float32"),
    "bfloat16": ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
}
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
}
LAYERS = 2


@pytest.fixture(params=EXPORTS)
def export(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bundle(export: str, tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]) -> Bundle:
    return exported(tiny_llama(), **EXPORTS[export][0])


@pytest.fixture(params=GRAPHS)
def graph(request: pytest.FixtureRequest) -> GraphName:
    return request.param


@pytest.fixture
def model(bundle: Bundle, graph: GraphName) -> onnx.ModelProto:
    return onnx.load(str(bundle.graph_path(graph)), load_external_data=False)


def described(values: Any) -> list[tuple[str, int, tuple[str | int, ...]]]:
    """Name, element type and shape of each graph value."""
    return [
        (
            value.name,
            value.type.tensor_type.elem_type,
            tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in values
    ]


def expected(tensors: tuple[TensorSpec, ...]) -> list[tuple[str, int, tuple[str | int, ...]]]:
    return [(tensor.name, ONNX_TYPES[tensor.dtype], tensor.shape) for tensor in tensors]


def test_inputs_and_outputs_are_those_of_the_contract(
    bundle: Bundle, graph: GraphName, model: onnx.ModelProto
) -> None:
    spec = bundle.contract.graph(graph)
    outputs = [value for value in model.graph.output if not value.name.startswith("hidden_states.")]
    assert described(model.graph.input) == expected(spec.inputs)
    assert described(outputs) == expected(spec.outputs)


def test_names_are_those_that_the_design_spells(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]
) -> None:
    bundle = exported(tiny_llama())
    prefill = onnx.load(str(bundle.path / "prefill.onnx"), load_external_data=False).graph
    decode = onnx.load(str(bundle.path / "decode.onnx"), load_external_data=False).graph
    cache = [f"past_key_values.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]
    present = [f"present.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]
    assert [value.name for value in prefill.input] == ["input_ids", "past_length", "logit_positions", *cache]
    assert [value.name for value in decode.input] == ["input_ids", "past_length", *cache]
    assert [value.name for value in prefill.output] == ["logits", *present]
    assert [value.name for value in decode.output] == ["logits", *present]
    shapes = {name: shape for name, _, shape in described((*prefill.input, *prefill.output))}
    assert shapes["logits"] == ("B", "N", 97)
    assert shapes["past_key_values.1.value"] == shapes["present.1.value"] == ("B", 2, "T", 8)
    assert described(decode.output)[0] == ("logits", TensorProto.FLOAT, ("B", 1, 97))


def test_graph_passes_the_full_checker(bundle: Bundle, graph: GraphName) -> None:
    onnx.checker.check_model(str(bundle.graph_path(graph)), full_check=True)


def test_operators_are_standard_ones_of_opset_24(model: onnx.ModelProto) -> None:
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
    assert not model.functions
    for node in model.graph.node:
        assert node.domain == ""
        assert onnx.defs.has(node.op_type, 24)
        assert node.op_type not in {"If", "Loop", "Scan", "Identity", "Constant"}
        assert not any(attribute.HasField("g") for attribute in node.attribute)


def test_layers_are_whole_operators_and_nothing_more(model: onnx.ModelProto, export: str) -> None:
    counts = Counter(node.op_type for node in model.graph.node)
    assert counts["Attention"] == LAYERS
    assert counts["RotaryEmbedding"] == counts["TensorScatter"] == 2 * LAYERS
    assert counts["RMSNormalization"] == 2 * LAYERS + 1
    # q, k, v, o, gate, up, down; and the head.
    assert counts["MatMul"] == 7 * LAYERS + 1
    # Two residual additions a layer; and positions.
    assert counts["Add"] == 2 * LAYERS + 1
    if export in ("float32", "capacity"):
        # Positions are turned into float32; nothing else changes its type.
        assert counts["Cast"] == 1


def test_shapes_are_not_computed_inside_layers(model: onnx.ModelProto) -> None:
    inside = [node for node in model.graph.node if node.name.startswith("layers.")]
    assert len(inside) > 10 * LAYERS
    assert not [node.name for node in inside if node.op_type in {"Shape", "Concat", "Gather", "Range"}]


def test_attention_is_explicit_about_mask_and_scale(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Attention":
            assert len(node.input) == 4
            assert len(node.output) == 1
            values = {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute}
            assert values.pop("scale") == pytest.approx(8**-0.5)
            assert not any(values.values()), "is_causal, softcap and the like are off"


def test_residual_stream_has_fixed_names(model: onnx.ModelProto) -> None:
    produced = {name for node in model.graph.node for name in node.output}
    assert {hidden_state(layer) for layer in range(LAYERS + 1)} <= produced


def test_symbolic_dimensions_are_the_letters_of_the_contract(
    model: onnx.ModelProto, graph: GraphName, export: str
) -> None:
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    letters = {dim for _, _, shape in described(values) for dim in shape if isinstance(dim, str) and dim}
    allowed = {"B", "S", "N"} if graph == "prefill" else {"B"}
    assert letters == (allowed if export == "capacity" else allowed | {"T"})


def test_graph_says_nothing_of_the_machine_that_made_it(
    bundle: Bundle, graph: GraphName, repository: Path
) -> None:
    content = bundle.graph_path(graph).read_bytes()
    for text in (str(repository), "site-packages", "pkg.torch", "namespace"):
        assert text.encode() not in content


def types(model: onnx.ModelProto) -> dict[str, int]:
    """Element type of every value, inferred."""
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True).graph
    values = {
        name: kind for name, kind, _ in described((*inferred.input, *inferred.value_info, *inferred.output))
    }
    return values | {tensor.name: tensor.data_type for tensor in inferred.initializer}


def inputs_of(model: onnx.ModelProto, operator: str) -> Iterator[str]:
    for node in model.graph.node:
        if node.op_type == operator:
            yield from node.input


def test_norms_angles_and_logits_are_float32_whatever_the_type(model: onnx.ModelProto) -> None:
    kinds = types(model)
    for operator in ("RMSNormalization", "Cos", "Sin"):
        names = list(inputs_of(model, operator))
        assert names
        assert {kinds[name] for name in names} == {TensorProto.FLOAT}
    assert kinds["logits"] == TensorProto.FLOAT


def test_positions_become_float32_at_once(model: onnx.ModelProto) -> None:
    """Rounded to half precision on the way, angles at a few thousand positions are off by whole radians."""
    kinds, producers = types(model), {name: node for node in model.graph.node for name in node.output}
    (cos,) = (node for node in model.graph.node if node.op_type == "Cos")
    product = producers[cos.input[0]]
    factors = {producers[name].op_type if name in producers else name: name for name in product.input}
    assert factors.keys() == {"Cast", "frequencies"}
    assert {kinds[name] for name in factors.values()} == {TensorProto.FLOAT}
    assert kinds[producers[factors["Cast"]].input[0]] == TensorProto.INT64


def test_products_attention_and_cache_are_of_the_type_asked_for(model: onnx.ModelProto, export: str) -> None:
    kinds, compute = types(model), ONNX_TYPES[EXPORTS[export][1]]
    for operator in ("MatMul", "RotaryEmbedding", "TensorScatter"):
        found = {kinds[name] for name in inputs_of(model, operator)} - {TensorProto.INT64}
        assert found == {compute}
    assert {kinds[name] for name in inputs_of(model, "Attention")} == {compute, TensorProto.BOOL}
    assert kinds["past_key_values.0.key"] == kinds["present.1.value"] == compute


def test_residual_stream_is_of_the_type_asked_for(model: onnx.ModelProto, export: str) -> None:
    kinds = types(model)
    found = {kinds[hidden_state(layer)] for layer in range(LAYERS + 1)}
    assert found == {ONNX_TYPES[EXPORTS[export][2]]}


def test_bundle_records_the_types(bundle: Bundle, export: str) -> None:
    assert (bundle.dtype, bundle.residual_dtype) == EXPORTS[export][1:]


def test_norm_weights_are_stored_in_float32(bundle: Bundle, export: str) -> None:
    stored = {name: weight["dtype"] for name, weight in bundle.weights.items()}
    norms = {name for name in stored if "norm" in name}
    assert len(norms) == 2 * LAYERS + 1
    assert {stored[name] for name in norms} == {"float32"}
    assert {stored[name] for name in stored.keys() - norms} == {EXPORTS[export][1]}


def test_debug_outputs_come_after_the_contracts(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle], graph: GraphName
) -> None:
    bundle = exported(tiny_llama(), **EXPORTS["capacity"][0])
    outputs = onnx.load(str(bundle.graph_path(graph)), load_external_data=False).graph.output
    new = "S" if graph == "prefill" else 1
    assert described(outputs)[-LAYERS - 1 :] == [
        (f"hidden_states.{layer}", TensorProto.FLOAT, ("B", new, 20)) for layer in range(LAYERS + 1)
    ]
