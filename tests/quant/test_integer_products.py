"""INT8 products on ONNX Runtime are exact integer arithmetic, with the kernels of CPUs with and without VNNI."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from kvgraph.export.bundle import Bundle
from kvgraph.runtime import ort_load
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.threads import Threads

INPUTS, OUTPUTS = 256, 48
SCALES = 0.5, 0.25


def product_model(products: int) -> tuple[bytes, list[NDArray[np.int64]]]:
    """Products of one input, rounded once, with weights that are all at the end of their range."""
    signs = np.random.default_rng(0).choice([-127, 127], (products, INPUTS, OUTPUTS))
    signs[:, :, 0] = 127
    tensors = {"s": np.float32(SCALES[0]), "z": np.int8(0), "ws": np.full(OUTPUTS, SCALES[1], np.float32)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
    ]
    for index in range(products):
        tensors[f"w{index}"] = signs[index].astype(np.int8)
        nodes.append(helper.make_node("DequantizeLinear", [f"w{index}", "ws"], [f"f{index}"], axis=1))
        nodes.append(helper.make_node("MatMul", ["d", f"f{index}"], [f"y{index}"]))
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["B", INPUTS])],
        [helper.make_tensor_value_info(f"y{index}", kind, ["B", OUTPUTS]) for index in range(products)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return model.SerializeToString(), list(signs)


def fused_types(path: Path) -> list[tuple[str, str]]:
    """Element types of both factors of every integer product of an optimized graph."""
    model = onnx.load(path)
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    found = []
    for node in model.graph.node:
        if node.op_type == "MatMulIntegerToFloat":
            # The zero point says the type of the rounded input.
            kinds = types[node.input[4]], types[node.input[1]]
            found.append(tuple(onnx.TensorProto.DataType.Name(kind) for kind in kinds))
    return found


@pytest.mark.parametrize("saturates", [False, True], ids=["VNNI", "no VNNI"])
@pytest.mark.parametrize("products", [1, 3])
def test_products_equal_integer_arithmetic(
    products: int, saturates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not saturates and ort_load.int8_products_saturate():
        pytest.skip("this CPU has no VNNI")
    monkeypatch.setattr(ort_load, "int8_products_saturate", lambda: saturates)
    options = ort_load.session_options(Threads(1), mapped_weights=False)
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    content, weights = product_model(products)
    session = onnxruntime.InferenceSession(content, options)
    codes = np.random.default_rng(1).integers(90, 128, (5, INPUTS))
    results = session.run(None, {"x": codes.astype(np.float32) * np.float32(SCALES[0])})
    for weight, result in zip(weights, results, strict=True):
        # Powers of two as scales: float32 holds every sum.
        np.testing.assert_array_equal(result, (codes @ weight) * SCALES[0] * SCALES[1])
    if saturates:
        # Signed bytes on both sides, whose sums are never cut to 16 bits.
        assert fused_types(tmp_path / "optimized.onnx") == [("INT8", "INT8")] * products


def test_recipe_runs_the_same_on_both_kinds_of_cpu(
    tiny: Bundle, quantized: Callable[[Bundle, str], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, ids = quantized(tiny, "int8-dynamic"), np.arange(1, 9)[None]
    logits = []
    for saturates in (ort_load.int8_products_saturate(), True):
        monkeypatch.setattr(ort_load, "int8_products_saturate", lambda saturates=saturates: saturates)
        session = OrtSession(bundle, threads=1)
        logits.append(session.prefill(session.allocate_cache(1), ids, np.array([0]), np.arange(8)[None]))
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-4)
