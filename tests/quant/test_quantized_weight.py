"""Scales and codes of whole matrices, against the formulas of every scheme and ONNX's own DequantizeLinear."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from kvgraph.quant.formats import FORMATS, Floats
from kvgraph.quant.quantized_weight import QuantizedWeight, quantize_weight
from kvgraph.quant.recipe import load_recipe
from kvgraph.quant.recipe_files import recipe_names
from kvgraph.quant.scheme import WeightScheme

COMPUTE_TYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
INT8, INT4 = WeightScheme("int8"), WeightScheme("int4", 32)
UINT4 = WeightScheme("uint4", 32)
NVFP4 = WeightScheme("float4_e2m1", 16, "float8_e4m3fn")
MXFP4 = WeightScheme("float4_e2m1", 32, "power_of_two")


def matrix(rows: int = 96, columns: int = 24, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * 0.05


def quantize(weight: Floats, scheme: WeightScheme, compute: object = np.float32) -> QuantizedWeight:
    return quantize_weight(weight, scheme, np.dtype(compute))  # type: ignore[call-overload]


def blocked(weight: Floats, size: int) -> Floats:
    return weight.reshape(-1, size, weight.shape[1])


@pytest.mark.parametrize("compute", COMPUTE_TYPES)
@pytest.mark.parametrize("name", recipe_names())
def test_dequantizes_as_onnx_does(name: str, compute: type) -> None:
    scheme = load_recipe(name).linear.weight
    found = quantize(matrix(), scheme, compute)
    scale = found.scale.astype(compute)
    if found.global_scale is not None:
        scale = (found.scale * found.global_scale).astype(compute)
    inputs = {"codes": found.codes, "scale": scale.astype(np.float32)}
    if found.zero_point is not None:
        inputs["zero_point"] = found.zero_point
    granularity = {"axis": 1} if scheme.block_size is None else {"axis": 0, "block_size": scheme.block_size}
    node = helper.make_node("DequantizeLinear", list(inputs), ["y"], **granularity)
    infos = [
        helper.make_tensor_value_info(key, numpy_helper.from_array(value).data_type, value.shape)
        for key, value in inputs.items()
    ]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, found.codes.shape)
    model = helper.make_model(
        helper.make_graph([node], "g", infos, [output]), opset_imports=[helper.make_opsetid("", 24)]
    )
    (expected,) = ReferenceEvaluator(model).run(None, inputs)
    np.testing.assert_array_equal(found.dequantize(), expected)


@pytest.mark.parametrize("compute", COMPUTE_TYPES)
@pytest.mark.parametrize("name", recipe_names())
def test_no_weight_is_further_from_its_code_than_the_formats_widest_step(name: str, compute: type) -> None:
    weight, scheme = matrix(), load_recipe(name).linear.weight
    found = quantize(weight, scheme, compute)
    error = np.abs(found.dequantize() - weight)
    # Per scale: half the widest step, and what lies beyond the largest code (clipped on purpose, or by rounding).
    size = scheme.block_size or len(weight)
    largest = np.abs(blocked(weight, size)).max(axis=1)
    half_step = {"int8": 0.5 / 127, "int4": 0.5 / 7, "uint4": 1 / 15, "float8_e4m3fn": 16 / 448}.get(
        scheme.format, 1 / 6
    )
    beyond = 0.4 if scheme.clip == "mse" else 0.26 if scheme.scale_form == "power_of_two" else 0.07
    bound = largest * (half_step + (beyond if "4" in scheme.format else 0.005))
    assert (blocked(error, size) <= bound[:, None, :]).all()


def test_int8_scale_is_the_largest_weight_of_the_channel_by_127() -> None:
    weight = matrix()
    np.testing.assert_allclose(quantize(weight, INT8).scale, np.abs(weight).max(axis=0) / 127, rtol=1e-6)


def test_int4_scale_is_the_largest_weight_of_the_block_by_7() -> None:
    weight = matrix()
    expected = np.abs(blocked(weight, 32)).max(axis=1) / 7
    np.testing.assert_allclose(quantize(weight, INT4).scale, expected, rtol=1e-6)


def test_nvfp4_scales_follow_the_formats_definition() -> None:
    weight = matrix()
    found = quantize(weight, NVFP4)
    global_scale = np.abs(weight).max() / (6 * 448)
    assert found.global_scale == pytest.approx(global_scale, rel=1e-6)
    expected = (np.abs(blocked(weight, 16)).max(axis=1) / 6 / global_scale).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.scale, expected.astype(np.float32))


def test_nvfp4_global_scale_of_a_part_is_that_of_the_whole() -> None:
    weight = matrix()
    whole = quantize(weight, NVFP4)
    part = quantize_weight(weight[:, 8:16], NVFP4, np.dtype(np.float32), float(np.abs(weight).max()))
    assert part.global_scale == whole.global_scale
    np.testing.assert_array_equal(part.dequantize(), whole.dequantize()[:, 8:16])


def test_mxfp4_scales_are_powers_of_two_of_the_largest_weights_exponent() -> None:
    weight = matrix()
    expected = 2.0 ** (np.floor(np.log2(np.abs(blocked(weight, 32)).max(axis=1))) - 2)
    np.testing.assert_array_equal(quantize(weight, MXFP4).scale, expected)


@pytest.mark.parametrize(("factor", "exponent"), [(1e-12, -24), (1e4, 15)])
def test_mxfp4_scales_stay_in_the_range_of_float16(factor: float, exponent: int) -> None:
    weight = np.full((32, 2), factor, np.float32) * np.float32(1e3 if exponent > 0 else 1)
    assert quantize(weight, MXFP4, np.float16).scale.tolist() == [[2.0**exponent] * 2]


def test_uint4_covers_from_least_to_largest_weight_and_holds_zero() -> None:
    weight = matrix() + np.float32(0.03)
    weight[5, 3] = 0
    found = quantize(weight, UINT4)
    low, high = blocked(weight, 32).min(axis=1), blocked(weight, 32).max(axis=1)
    np.testing.assert_allclose(found.scale, (np.maximum(high, 0) - np.minimum(low, 0)) / 15, rtol=1e-6)
    assert found.zero_point is not None
    assert found.zero_point.dtype == ml_dtypes.uint4
    assert found.dequantize()[5, 3] == 0


@pytest.mark.parametrize("scheme", [INT4, UINT4])
def test_clip_search_has_no_larger_squared_error_than_the_full_range(scheme: WeightScheme) -> None:
    weight = np.random.default_rng(0).standard_t(3, (96, 24)).astype(np.float32)
    searched = WeightScheme(scheme.format, scheme.block_size, clip="mse")
    errors = [np.square(quantize(weight, one).dequantize() - weight) for one in (searched, scheme)]
    searched_sum, full_sum = (blocked(error, 32).sum(axis=1) for error in errors)
    assert (searched_sum <= full_sum * (1 + 1e-5)).all()
    assert searched_sum.sum() < 0.95 * full_sum.sum()


@pytest.mark.parametrize("name", recipe_names())
def test_all_zero_channel_gets_a_usable_scale(name: str) -> None:
    weight = matrix()
    weight[:, 3] = 0
    found = quantize(weight, load_recipe(name).linear.weight, np.float16)
    assert np.isfinite(found.scale).all()
    assert (found.scale > 0).all()
    assert not found.dequantize()[:, 3].any()


@pytest.mark.parametrize("compute", COMPUTE_TYPES)
@pytest.mark.parametrize("name", recipe_names())
def test_tiny_weights_get_a_usable_scale(name: str, compute: type) -> None:
    weight = np.full((64, 4), 1e-38, np.float32)
    found = quantize(weight, load_recipe(name).linear.weight, compute)
    assert np.isfinite(found.dequantize()).all()
    assert (found.scale > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weight_that_is_not_finite_is_an_error(bad: float) -> None:
    weight = matrix()
    weight[1, 2] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize(weight, INT8)


@pytest.mark.parametrize("compute", COMPUTE_TYPES)
def test_scales_are_values_of_the_compute_type(compute: type) -> None:
    scale = quantize(matrix(), INT8, compute).scale
    np.testing.assert_array_equal(scale, scale.astype(compute).astype(np.float32))


@pytest.mark.parametrize("scheme", [INT4, UINT4, NVFP4, MXFP4])
def test_last_block_may_be_short(scheme: WeightScheme) -> None:
    assert scheme.block_size is not None
    rows = 2 * scheme.block_size + 5
    weight = matrix(rows)
    whole = np.concatenate([weight, np.zeros((scheme.block_size - 5, weight.shape[1]), np.float32)])
    found, filled = quantize(weight, scheme), quantize(whole, scheme)
    assert found.codes.shape == weight.shape
    assert found.scale.shape == (3, weight.shape[1])
    np.testing.assert_array_equal(found.dequantize(), filled.dequantize()[:rows])


def test_codes_are_in_the_formats_type() -> None:
    for name in recipe_names():
        scheme = load_recipe(name).linear.weight
        assert quantize(matrix(), scheme).codes.dtype == FORMATS[scheme.format].element
