"""Rounding and packing of every number format, against ml_dtypes, the formats' definitions and onnx."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from kvgraph.quant.formats import FORMATS, pack

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = tuple(
    [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    + [(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)][:-1]
)
VALUES = {
    "int8": tuple(range(-127, 128)),
    "int4": tuple(range(-8, 8)),
    "uint4": tuple(range(16)),
    "uint8": tuple(range(256)),
    "float8_e4m3fn": tuple(sorted({*E4M3, *(-value for value in E4M3)})),
    "float4_e2m1": tuple(sorted({*E2M1, *(-value for value in E2M1)})),
}


def nearest(value: float, grid: tuple[float, ...], even: dict[float, bool]) -> float:
    """The nearest of a grid; of two, the one whose code is even."""
    distance = min(abs(value - point) for point in grid)
    near = [point for point in grid if abs(value - point) == distance]
    return next((point for point in near if even[point]), near[0])


@pytest.mark.parametrize("name", FORMATS)
def test_every_value_of_the_format_stays(name: str) -> None:
    values = np.array(VALUES[name], np.float32)
    np.testing.assert_array_equal(FORMATS[name].round(values).astype(np.float32), values)


@pytest.mark.parametrize("name", FORMATS)
def test_rounds_to_nearest_and_ties_to_even(name: str) -> None:
    grid = VALUES[name]
    # Codes count upwards from zero: every second value is even.
    ordered = sorted(grid, key=abs)
    ranks = {value: sorted({abs(other) for other in ordered}).index(abs(value)) for value in grid}
    even = {value: ranks[value] % 2 == 0 for value in grid}
    middles = [(low + high) / 2 for low, high in itertools.pairwise(grid)]
    beside = [math.nextafter(middle, direction) for middle in middles for direction in (-1e9, 1e9)]
    values = np.array([*middles, *np.float32(beside), *np.linspace(grid[0], grid[-1], 997)], np.float32)
    expected = [nearest(float(value), grid, even) for value in values]
    np.testing.assert_array_equal(FORMATS[name].round(values).astype(np.float32), expected)
    np.testing.assert_array_equal(FORMATS[name].nearest(values), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_saturates(name: str) -> None:
    form = FORMATS[name]
    found = form.round(np.array([1e4, -1e4, 1e30, -1e30], np.float32)).astype(np.float32)
    np.testing.assert_array_equal(found, [form.maximum, form.minimum] * 2)


def test_float_formats_are_those_of_ml_dtypes() -> None:
    values = np.random.default_rng(0).standard_normal(4000).astype(np.float32)
    for name, kind in (
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float4_e2m1", ml_dtypes.float4_e2m1fn),
    ):
        np.testing.assert_array_equal(
            FORMATS[name].round(values).view(np.uint8), values.astype(kind).view(np.uint8)
        )


@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (7,), (1,)])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("int8", onnx.TensorProto.INT8),
        ("int4", onnx.TensorProto.INT4),
        ("uint4", onnx.TensorProto.UINT4),
        ("float8_e4m3fn", onnx.TensorProto.FLOAT8E4M3FN),
        ("float4_e2m1", onnx.TensorProto.FLOAT4E2M1),
    ],
)
def test_packs_as_onnx_does(name: str, kind: int, shape: tuple[int, ...]) -> None:
    form = FORMATS[name]
    values = form.round(
        np.random.default_rng(1).uniform(form.minimum, form.maximum, shape).astype(np.float32)
    )
    tensor = numpy_helper.from_array(values)
    assert tensor.data_type == kind
    assert pack(values, form.bits).tobytes() == tensor.raw_data


def test_packs_a_transposed_matrix_in_the_order_of_its_rows() -> None:
    values = np.arange(6, dtype=np.int8).reshape(2, 3).astype(ml_dtypes.int4).T
    assert pack(values, 4).tolist() == [0x30, 0x41, 0x52]
