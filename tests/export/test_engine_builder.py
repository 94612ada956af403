"""One engine from one graph: what TensorRT is told, and what it says when it fails. None of this needs a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import CONTEXT_LENGTH, TensorSpec
from kvgraph.export.targets.engine_builder import allow_decomposition, build_engine
from kvgraph.export.targets.profiles import profile_shapes
from kvgraph.export.targets.tensorrt_graph import TensorRTGraph, lower_for_tensorrt
from kvgraph.runtime.target import Limits
from kvgraph.runtime.tensorrt_module import collect_messages, load_tensorrt

# The same operators over fewer slots: only the order of sums differs.
FLOAT32_TOLERANCE = 1e-5
LIMITS = Limits(max_batch=2, max_context=16, prefill_chunk=8)

Exported = Callable[..., Bundle]
TinyLlama = Callable[..., Path]


@pytest.fixture(scope="session")
def trt() -> Any:
    return load_tensorrt("tensorrt-rtx")


@pytest.fixture(scope="session")
def bundle(exported: Exported, tiny_llama: TinyLlama) -> Bundle:
    return exported(tiny_llama(), dtype="float32")


@pytest.fixture(scope="session")
def graph(bundle: Bundle) -> TensorRTGraph:
    return lower_for_tensorrt(bundle.graph_path("prefill"), "prefill", bundle.contract, LIMITS.max_context)


def build(trt: Any, graph: TensorRTGraph, capability: int = 89) -> memoryview:
    return build_engine(trt, graph, [profile_shapes(graph.inputs, "prefill", LIMITS)], [capability])


def test_lowered_graph_computes_the_same_over_the_context_in_use(
    bundle: Bundle, graph: TensorRTGraph, tmp_path: Path
) -> None:
    shutil.copy(bundle.path / "weights.safetensors", tmp_path)
    (tmp_path / "lowered.onnx").write_bytes(graph.model)
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {
        "input_ids": random.integers(0, 97, (2, 3)),
        "past_length": np.array([4, 1]),
        "logit_positions": np.array([[2, 0], [1, 2]]),
    }
    for tensor in bundle.contract.state:
        shape = (2, tensor.shape[1], LIMITS.max_context, tensor.shape[3])
        feeds[tensor.name] = random.standard_normal(shape).astype(np.float32)
    canonical = run(bundle.graph_path("prefill"), feeds)
    for context in (7, 8, 16):
        results = run(tmp_path / "lowered.onnx", {**feeds, CONTEXT_LENGTH: np.array([context])})
        for left, right in zip(canonical, results, strict=True):
            np.testing.assert_allclose(left, right, atol=FLOAT32_TOLERANCE)


def run(path: Path, feeds: dict[str, Any]) -> list[np.ndarray]:
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options).run(None, feeds)


def test_every_attention_is_marked_decomposable(trt: Any, graph: TensorRTGraph) -> None:
    log = collect_messages(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.parse(graph.model, str(graph.path))
    marked = []
    allow_decomposition(trt, network)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer
            marked.append(layer.attention.decomposable)
    assert marked == [True, True]


def test_a_build_error_names_node_and_cause(
    trt: Any, graph: TensorRTGraph, capfd: pytest.CaptureFixture[str]
) -> None:
    message = (
        r"prefill.onnx: TensorRT 1\.\S+ does not build the graph: node '.*' \(MatMul\): .*FP32 GEMM is not"
    )
    with pytest.raises(RuntimeError, match=message) as caught:
        build(trt, graph, capability=75)
    assert "\n" not in str(caught.value)
    assert "/_src/" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_parse_error_names_node_and_cause(trt: Any, graph: TensorRTGraph) -> None:
    model = onnx.load_from_string(graph.model)
    attention = next(node for node in model.graph.node if node.op_type == "Attention")
    del attention.attribute[:]
    attention.attribute.append(onnx.helper.make_attribute("softcap", 30.0))
    message = rf"does not parse the graph: node \d+ '{attention.name}' \(Attention\): .*softcap"
    with pytest.raises(RuntimeError, match=message) as caught:
        build(trt, replace(graph, model=model.SerializeToString()))
    assert "\n" not in str(caught.value)


def test_a_symbolic_capacity_is_a_parse_error_that_names_the_scatter(
    trt: Any, bundle: Bundle, graph: TensorRTGraph
) -> None:
    canonical = replace(graph, model=bundle.graph_path("prefill").read_bytes())
    with pytest.raises(
        RuntimeError, match=r"node \d+ '.*' \(TensorScatter\): .*static sequence length dimension"
    ):
        build(trt, canonical)


def test_bytes_that_are_no_model_are_refused(trt: Any, graph: TensorRTGraph) -> None:
    with pytest.raises(RuntimeError, match=r"does not parse the graph: .*Failed to parse the ONNX model"):
        build(trt, replace(graph, model=b"not a model"))


def test_missing_weights_are_named(trt: Any, graph: TensorRTGraph, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"import initializer.*Failed to open file: .*weights.safetensors"):
        build(trt, replace(graph, path=tmp_path / "prefill.onnx"))


def test_a_refused_profile_says_which_input(trt: Any, graph: TensorRTGraph) -> None:
    shapes = {**profile_shapes(graph.inputs, "prefill", LIMITS), "past_length": ((2,), (1,), (1,))}
    with pytest.raises(RuntimeError, match=r"does not take the optimization profile: .*past_length"):
        build_engine(trt, graph, [shapes], [89])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            TensorSpec("past_length", "int32", ("B",)),
            "input 'past_length' is int64 in TensorRT, contract says int32",
        ),
        (
            TensorSpec("past_length", "int64", ("B", 1)),
            r"input 'past_length' has shape \[-1\] in TensorRT, contract",
        ),
        (TensorSpec("lengths", "int64", ("B",)), "differ in lengths, past_length"),
    ],
    ids=["dtype", "shape", "name"],
)
def test_inputs_are_compared_with_the_contract(
    trt: Any, graph: TensorRTGraph, change: TensorSpec, message: str
) -> None:
    inputs = tuple(change if tensor.name == "past_length" else tensor for tensor in graph.inputs)
    with pytest.raises(ValueError, match=message):
        build(trt, replace(graph, inputs=inputs))


def test_outputs_are_compared_with_the_contract(trt: Any, graph: TensorRTGraph) -> None:
    outputs = (TensorSpec("logits", "float32", ("B", "N", 96)), *graph.outputs[1:])
    with pytest.raises(
        ValueError, match=r"output 'logits' has shape \[-1, -1, 97\] in TensorRT, contract says"
    ):
        build(trt, replace(graph, outputs=outputs))
