"""Quantized weights in the forms that TensorRT and ONNX Runtime have: the same values, the same products."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from kvgraph.export.passes.lower_dequantize import lower_dequantize
from kvgraph.export.passes.lower_float4 import lower_float4

# Products in float16 and sums in another order.
TOLERANCE = {"float32": 2e-6, "float16": 2e-3}
TYPES: dict[str, tuple[int, Any]] = {
    "float32": (TensorProto.FLOAT, np.float32),
    "float16": (TensorProto.FLOAT16, np.float16),
}
RNG = np.random.default_rng(0)


def weight_model(
    folder: Path, inputs: dict[str, NDArray[Any]], nodes: list[onnx.NodeProto], dtype: str, rows: int
) -> ir.Model:
    """y = x @ w, where `nodes` make w [rows, O] of `inputs`, which lie outside of the graph as in a bundle."""
    kind, _ = TYPES[dtype]
    columns = inputs["codes"].shape[1]
    graph = helper.make_graph(
        [*nodes, helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, ["B", rows])],
        [helper.make_tensor_value_info("y", kind, ["B", columns])],
        [numpy_helper.from_array(value, name) for name, value in inputs.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    folder.mkdir(exist_ok=True)
    onnx.save(
        onnx.shape_inference.infer_shapes(model),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights",
        size_threshold=0,
    )
    return ir.load(folder / "model.onnx")


def product(model: ir.Model, folder: Path, x: NDArray[Any]) -> NDArray[Any]:
    path = folder / "lowered.onnx"
    path.write_bytes(ir.to_proto(model).SerializeToString())
    onnx.checker.check_model(str(path), full_check=True)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(path, options)
    result: NDArray[Any] = session.run(None, {"x": x})[0]
    return result


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def int4_model(
    folder: Path, dtype: str, rows: int, columns: int, zero_point: bool, axis: int = 0
) -> ir.Model:
    """A weight in blocks of 16 along `axis`."""
    shape = (rows, columns)
    blocks = tuple(-(-size // 16) if at == axis else size for at, size in enumerate(shape))
    inputs = {
        "codes": RNG.integers(-8, 8, shape).astype(ml_dtypes.int4),
        "scale": RNG.uniform(0.01, 0.02, blocks).astype(TYPES[dtype][1]),
    }
    if zero_point:
        inputs["zero_point"] = RNG.integers(-8, 8, blocks).astype(ml_dtypes.int4)
    node = helper.make_node("DequantizeLinear", list(inputs), ["w"], axis=axis, block_size=16)
    return weight_model(folder, inputs, [node], dtype, rows)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("zero_point", [False, True])
@pytest.mark.parametrize("shape", [(48, 32), (37, 41)], ids=["whole", "short"])
def test_tensorrt_form_of_a_weight_in_blocks(
    shape: tuple[int, int], zero_point: bool, axis: int, dtype: str, tmp_path: Path
) -> None:
    model = int4_model(tmp_path, dtype, *shape, zero_point, axis)
    x = RNG.standard_normal((3, shape[0])).astype(TYPES[dtype][1])
    expected = product(model, tmp_path, x)
    short = shape[axis] % 16 != 0
    assert lower_dequantize(model) is (zero_point or short)
    np.testing.assert_allclose(
        product(model, tmp_path, x), expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max()
    )
    (node,) = [node for node in model.graph if node.op_type == "DequantizeLinear"]
    assert len(node.inputs) == 2
    assert node.inputs[0] is not None
    assert node.inputs[0].shape is not None
    assert node.inputs[0].shape.numpy()[axis] % 16 == 0
    assert not lower_dequantize(model)


def test_tensorrt_form_of_a_zero_point_for_each_channel(tmp_path: Path) -> None:
    inputs = {
        "codes": RNG.integers(-8, 8, (20, 12)).astype(ml_dtypes.int4),
        "scale": RNG.uniform(0.01, 0.02, 12).astype(np.float32),
        "zero_point": RNG.integers(-8, 8, 12).astype(ml_dtypes.int4),
    }
    node = helper.make_node("DequantizeLinear", list(inputs), ["w"], axis=1)
    model = weight_model(tmp_path, inputs, [node], "float32", 20)
    x = RNG.standard_normal((3, 20)).astype(np.float32)
    expected = product(model, tmp_path, x)
    assert lower_dequantize(model)
    assert operators(model) == {"DequantizeLinear": 1, "Sub": 1, "MatMul": 1}
    np.testing.assert_allclose(product(model, tmp_path, x), expected, rtol=0, atol=1e-5)


def test_symmetric_weight_in_whole_blocks_is_left_as_it_is(tmp_path: Path) -> None:
    model = int4_model(tmp_path, "float32", 32, 8, zero_point=False)
    assert not lower_dequantize(model)
    assert operators(model) == {"DequantizeLinear": 1, "MatMul": 1}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("two_levels", [False, True], ids=["float scales", "E4M3 scales"])
@pytest.mark.parametrize("shape", [(48, 32), (37, 41)], ids=["even", "odd"])
def test_integer_form_of_4_bit_floats_is_exact(
    shape: tuple[int, int], two_levels: bool, dtype: str, tmp_path: Path
) -> None:
    kind, element = TYPES[dtype]
    blocks = (-(-shape[0] // 16), shape[1])
    codes = RNG.standard_normal(shape).astype(ml_dtypes.float4_e2m1fn)
    scale = RNG.uniform(0.5, 2, blocks).astype(ml_dtypes.float8_e4m3fn if two_levels else element)
    inputs: dict[str, NDArray[Any]] = {"codes": codes, "scale": scale}
    nodes = [helper.make_node("DequantizeLinear", ["codes", "scale"], ["w"], axis=0, block_size=16)]
    values = scale.astype(np.float32)
    if two_levels:
        inputs["global_scale"] = np.array(0.0123, np.float32)
        values = (values * np.float32(0.0123)).astype(element).astype(np.float32)
        output = {} if dtype == "float32" else {"output_dtype": kind}
        first = helper.make_node("DequantizeLinear", ["scale", "global_scale"], ["s"], **output)
        nodes = [first, helper.make_node("DequantizeLinear", ["codes", "s"], ["w"], axis=0, block_size=16)]
    model = weight_model(tmp_path, inputs, nodes, dtype, shape[0])
    assert lower_float4(model)
    assert not lower_float4(model)
    # Rows of the unit matrix give the weight itself.
    found = product(model, tmp_path, np.eye(shape[0], dtype=element))
    expected = codes.astype(np.float32) * np.repeat(values, 16, axis=0)[: shape[0]]
    np.testing.assert_array_equal(found, expected.astype(element))
    assert not [value for value in model.graph.initializers.values() if value.dtype == ir.DataType.FLOAT4E2M1]


def test_bytes_of_4_bit_floats_stay_where_they_are(tmp_path: Path) -> None:
    inputs = {
        "codes": RNG.standard_normal((32, 8)).astype(ml_dtypes.float4_e2m1fn),
        "scale": RNG.uniform(0.5, 2, (2, 8)).astype(np.float32),
    }
    node = helper.make_node("DequantizeLinear", list(inputs), ["w"], axis=0, block_size=16)
    model = weight_model(tmp_path, inputs, [node], "float32", 32)
    before = model.graph.initializers["codes"].const_value
    lower_float4(model)
    after = model.graph.initializers["codes/bytes"].const_value
    assert isinstance(before, ir.ExternalTensor)
    assert isinstance(after, ir.ExternalTensor)
    assert (after.location, after.offset, after.length) == (before.location, before.offset, before.length)


def test_onnxruntime_fuses_the_integer_form(tmp_path: Path) -> None:
    inputs = {
        "codes": RNG.standard_normal((64, 32)).astype(ml_dtypes.float4_e2m1fn),
        "scale": RNG.uniform(0.5, 2, (4, 32)).astype(np.float32),
    }
    node = helper.make_node("DequantizeLinear", list(inputs), ["w"], axis=0, block_size=16)
    model = weight_model(tmp_path, inputs, [node], "float32", 64)
    lower_float4(model)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    optimized = onnx.load(tmp_path / "optimized.onnx")
    assert [node.op_type for node in optimized.graph.node] == ["MatMulNBits"]


def test_reference_evaluator_agrees_with_the_tensorrt_form(tmp_path: Path) -> None:
    # ONNX Runtime fuses; the reference implementation does what the operators say.
    model = int4_model(tmp_path, "float32", 32, 8, zero_point=True)
    x = RNG.standard_normal((3, 32)).astype(np.float32)
    onnx_model = onnx.load(tmp_path / "model.onnx")
    (expected,) = ReferenceEvaluator(onnx_model).run(None, {"x": x})
    lower_dequantize(model)
    np.testing.assert_allclose(product(model, tmp_path, x), expected, rtol=0, atol=1e-5)
