"""Weights rounded in C++: the codes, scales and zero points that NumPy gives, bit for bit, on every instruction set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from kvgraph.quant import formats
from kvgraph.quant.bundle_weights import as_float32
from kvgraph.quant.compiled_rounding import channel_codes, column_extremes, round_compiled
from kvgraph.quant.quantized_weight import (
    QuantizedWeight,
    choose_channel_scales,
    quantize_finite,
    round_channels,
)
from kvgraph.quant.scheme import WeightScheme
from kvgraph.runtime.kernels import weights as compiled

pytestmark = pytest.mark.skipif(
    not compiled.compiled(), reason="kvgraph's CPU kernels are not compiled in this installation"
)

INTEGERS = ("int4", "uint4", "int8", "uint8")
TYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))


def matrix(
    kind: np.dtype[np.generic], rows: int = 256, columns: int = 70, seed: int = 0
) -> NDArray[np.generic]:
    """Columns of all magnitudes: some of zeros, some too small for a normal scale, some full of ties."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, columns)) * 10.0 ** random.integers(-8, 4, (1, columns))
    values[:, ::7] = np.round(random.standard_normal((rows, len(values[0, ::7]))) * 14) / 4
    values[: rows // 2, ::5] = 0
    values[:, -1] = np.abs(values[:, -1])
    return values.astype(kind)


def assert_same(found: QuantizedWeight | None, expected: QuantizedWeight) -> None:
    assert found is not None
    assert found.codes.dtype == expected.codes.dtype
    np.testing.assert_array_equal(found.codes.astype(np.int16), expected.codes.astype(np.int16))
    np.testing.assert_array_equal(found.scale, expected.scale)
    assert found.scale.dtype == np.float32
    assert (found.zero_point is None) == (expected.zero_point is None)
    if found.zero_point is not None and expected.zero_point is not None:
        assert found.zero_point.dtype == expected.zero_point.dtype
        np.testing.assert_array_equal(found.zero_point.astype(np.int16), expected.zero_point.astype(np.int16))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("clip", ["absmax", "mse"])
@pytest.mark.parametrize("format_name", INTEGERS)
def test_rounds_as_numpy_does(format_name: str, clip: str, kind: np.dtype[np.generic]) -> None:
    weight = matrix(kind)
    for block in (None, 16, 128):
        scheme = WeightScheme(format_name, block, clip=clip)  # type: ignore[arg-type]  # one of its literals
        for scale_dtype in TYPES:
            expected = quantize_finite(as_float32(weight), scheme, scale_dtype)
            assert_same(round_compiled(weight, scheme, scale_dtype), expected)


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("clip", ["absmax", "mse"])
@pytest.mark.parametrize("format_name", INTEGERS)
def test_rounds_a_table_whose_blocks_lie_along_rows(
    format_name: str, clip: str, kind: np.dtype[np.generic]
) -> None:
    weight = np.ascontiguousarray(matrix(kind).T).T
    for block in (16, 32, 128):
        scheme = WeightScheme(format_name, block, clip=clip)  # type: ignore[arg-type]  # one of its literals
        expected = quantize_finite(as_float32(weight), scheme, kind)
        assert_same(round_compiled(weight, scheme, kind), expected)
    whole = WeightScheme(format_name)
    assert_same(round_compiled(weight, whole, kind), quantize_finite(as_float32(weight), whole, kind))


@pytest.mark.parametrize("shape", [(100, 64), (40, 3), (17, 2), (16, 65), (33, 1)])
def test_leaves_to_numpy_or_rounds_alike_what_blocks_and_tiles_do_not_divide(shape: tuple[int, int]) -> None:
    weight = matrix(TYPES[0], *shape)
    for scheme in (WeightScheme("uint4", 32, clip="mse"), WeightScheme("int8", clip="mse")):
        for order in (weight, np.asfortranarray(weight), np.repeat(weight, 2, axis=1)[:, : shape[1]]):
            found = round_compiled(order, scheme, TYPES[0])
            if found is not None:
                assert_same(found, quantize_finite(order, scheme, TYPES[0]))


def draw(random: np.random.Generator) -> NDArray[np.generic]:
    """A matrix of an odd shape, in one of the orders that weights are read in, of values that are apt to go wrong."""
    kind = TYPES[random.integers(len(TYPES))]
    shape = (
        int(random.choice([1, 2, 7, 16, 17, 20, 33, 64, 100, 127, 128, 130])),
        int(random.choice([1, 2, 3, 16, 63, 65, 70])),
    )
    limits = ml_dtypes.finfo(kind)
    most, least = float(limits.max), float(limits.smallest_subnormal)
    drawn = (
        random.standard_normal(shape) * 10.0 ** random.integers(-44, 38, (1, shape[1])),
        random.choice([most, -most, most / 127, 1, 0, -0.0], shape),
        random.integers(-20, 21, shape) * least,
        random.integers(-127, 128, shape) * 2.0 ** random.integers(-20, 5) / random.choice([1, 127, 15]),
        -np.abs(random.standard_normal(shape)),
    )[random.integers(5)]
    values = np.where(random.random(shape) < random.choice([0.5, 1]), drawn, 0).clip(-most, most).astype(kind)
    gaps = np.repeat(values, 2, axis=1)[:, : shape[1]]
    gaps[:] = values
    return (values, np.asfortranarray(values), gaps)[random.integers(3)]


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_rounds_whatever_comes_as_numpy_does() -> None:
    covered = 0
    for seed in range(600):
        random = np.random.default_rng(seed)
        weight, scale_dtype = draw(random), TYPES[random.integers(len(TYPES))]
        scheme = WeightScheme(
            str(random.choice(INTEGERS)),
            (None, 16, 32, 128)[random.integers(4)],
            clip=str(random.choice(["absmax", "mse"])),  # type: ignore[arg-type]  # one of its literals
        )
        found = round_compiled(weight, scheme, scale_dtype)
        if found is not None:
            covered += 1
            assert_same(found, quantize_finite(as_float32(weight), scheme, scale_dtype))
    assert covered > 300


@pytest.mark.parametrize("inputs", [2, 7, 20, 100, 127])
def test_squares_that_eights_leave_over_are_added_by_numpy(inputs: int) -> None:
    """Of a table without blocks, whose rows are of any length."""
    weight = np.asfortranarray(matrix(TYPES[0], inputs))

    assert round_compiled(weight, WeightScheme("int4", clip="mse"), TYPES[0]) is None
    assert round_compiled(weight, WeightScheme("int4"), TYPES[0]) is not None


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("format_name", INTEGERS)
def test_rounds_rows_of_channels_as_numpy_does(format_name: str, kind: np.dtype[np.generic]) -> None:
    weight, scheme = matrix(kind), WeightScheme(format_name)
    floats = as_float32(weight)

    extremes = column_extremes(weight)

    assert extremes is not None
    np.testing.assert_array_equal(extremes, [floats.min(axis=0), floats.max(axis=0)])
    scales = choose_channel_scales(extremes, scheme, kind)
    codes = channel_codes(weight[:100], scales)
    assert codes is not None
    expected = round_channels(floats[:100], scales).codes
    np.testing.assert_array_equal(codes.astype(np.int16), expected.astype(np.int16))


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_widens_every_value_of_a_type(kind: np.dtype[np.generic]) -> None:
    if kind == np.float32:
        values = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    else:
        values = np.arange(1 << 16, dtype=np.uint16).view(kind)
    values = values[np.isfinite(values.astype(np.float32))]

    extremes = column_extremes(values[None])

    assert extremes is not None
    np.testing.assert_array_equal(extremes[0], values.astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_a_value_that_is_not_finite_is_left_for_numpy_to_report(
    kind: np.dtype[np.generic], bad: float
) -> None:
    weight = matrix(kind)
    weight[77, 69] = bad

    assert round_compiled(weight, WeightScheme("int4", 32), kind) is None
    assert round_compiled(np.asfortranarray(weight), WeightScheme("int4", 32), kind) is None
    assert column_extremes(weight) is None


@pytest.mark.parametrize("scheme", [WeightScheme("float8_e4m3fn"), WeightScheme("float4_e2m1", 32)])
def test_floating_formats_are_left_to_numpy(scheme: WeightScheme) -> None:
    assert round_compiled(matrix(TYPES[0]), scheme, TYPES[0]) is None


@pytest.mark.usefixtures("instruction_set")
@pytest.mark.parametrize("count", [1, 2, 31, 1000])
def test_packs_half_bytes_as_numpy_does(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.random.default_rng(count).integers(0, 256, count, np.uint8)

    found = formats.pack(codes, 4)

    monkeypatch.setattr(formats, "compiled", lambda: False)
    np.testing.assert_array_equal(found, formats.pack(codes, 4))
