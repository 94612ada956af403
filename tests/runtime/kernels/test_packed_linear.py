from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int8", "int8-block", "int4", "uint4")

Linear = Callable[..., np.ndarray]
Run = Callable[..., list[np.ndarray]]
# Of the largest result: sums of some hundred products in float32, in another order than NumPy's in float64.
SUMS = 3e-6
SHAPES = [(1, 100, 50), (3, 64, 33), (9, 96, 16), (17, 40, 130), (45, 160, 20), (70, 33, 48)]


def rounded(x: np.ndarray, form: str, scale: float = 0.0) -> np.ndarray:
    """An input in int8 and back, by the formulas of the operator's description."""
    if form == "float":
        return x
    if form == "static":
        return np.clip(np.rint(x / np.float32(scale)), -128, 127) * np.float64(np.float32(scale))
    size = 32 if form == "block" else x.shape[1]
    result = np.zeros(x.shape)
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size]
        scales = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
        result[:, start : start + size] = np.rint(part / scales) * scales.astype(np.float64)
    return result


@pytest.fixture
def linear(run: Run) -> Linear:
    """`linear(x, packed, outputs, layout, form, **options)`: one PackedLinear."""

    def compute(
        x: np.ndarray, packed: np.ndarray, outputs: int, layout: str, form: str, **options: Any
    ) -> np.ndarray:
        inputs = {"x": x, "weight": packed, "bias": options.pop("bias", None)}
        inputs["residual"] = options.pop("residual", None)
        attributes = {"input_scale": 0.0, "scale_format": "", "gate": "", "activation": "", **options}
        return run(
            "PackedLinear", inputs, 1,
            in_features=x.shape[1], out_features=outputs, format=layout, input=form, **attributes,
        )[0]  # fmt: skip

    return compute


def check(found: np.ndarray, expected: np.ndarray, tolerance: float = SUMS) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# The last one is more rows and more inputs than the strips and slices that they are cut into.
@pytest.mark.parametrize("layout", FLOATS)
@pytest.mark.parametrize("shape", [*SHAPES, (150, 1100, 33)])
def test_float_weights(
    instruction_set: str, layout: str, shape: tuple[int, int, int], linear: Linear, layouts: ModuleType
) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(0)
    packed, weights = layouts.random_weights(rng, inputs, outputs, layout, "")
    x = rng.standard_normal((rows, inputs), np.float32)
    check(linear(x, packed, outputs, layout, "float"), x @ weights)


@pytest.mark.parametrize("layout", FLOATS)
def test_every_digit_of_a_float_counts(
    instruction_set: str, layout: str, linear: Linear, layouts: ModuleType
) -> None:
    """Each result is one product, so that what is left out of a number shows."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((40, 1), np.float32) * np.float32(10.0) ** rng.integers(-25, 25, (40, 1))
    packed, weights = layouts.random_weights(rng, 1, 20, layout, "")
    found = linear(x.astype(np.float32), packed, 20, layout, "float")
    np.testing.assert_allclose(found, x.astype(np.float32).astype(np.float64) @ weights, rtol=3e-7)


@pytest.mark.parametrize("scale_format", ["float16", "float32"])
@pytest.mark.parametrize("layout", INTEGERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_integer_weights(
    instruction_set: str,
    layout: str,
    shape: tuple[int, int, int],
    scale_format: str,
    linear: Linear,
    layouts: ModuleType,
) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(1)
    scale_format = "" if layout == "int8" else scale_format
    packed, weights = layouts.random_weights(rng, inputs, outputs, layout, scale_format)
    x = rng.standard_normal((rows, inputs), np.float32)
    found = linear(x, packed, outputs, layout, "block", scale_format=scale_format)
    check(found, rounded(x, "block") @ weights)


@pytest.mark.parametrize("form", ["token", "static"])
@pytest.mark.parametrize("shape", SHAPES)
def test_one_scale_a_row(
    instruction_set: str, form: str, shape: tuple[int, int, int], linear: Linear, layouts: ModuleType
) -> None:
    rows, inputs, outputs = shape
    rng = np.random.default_rng(2)
    packed, weights = layouts.random_weights(rng, inputs, outputs, "int8", "")
    x = rng.standard_normal((rows, inputs), np.float32)
    found = linear(x, packed, outputs, "int8", form, input_scale=0.01)  # clips at 1.27, -128 included
    check(found, rounded(x, form, 0.01) @ weights)


def test_products_of_bytes_are_exact(instruction_set: str, linear: Linear, layouts: ModuleType) -> None:
    """The largest products of each sign, which saturate where pairs of them are added in 16 bits."""
    x = np.tile(np.array([[-128, 127]], np.float32), (3, 64))
    codes = np.tile(np.array([[-128], [127]]), (64, 20))
    packed = layouts.pack_integers(codes, np.ones((1, 20)), "int8", None, np.float32)
    found = linear(x, packed, 20, "int8", "static", input_scale=1.0)
    np.testing.assert_array_equal(found, x.astype(np.int64) @ codes)


def test_bias_and_residual(instruction_set: str, linear: Linear, layouts: ModuleType) -> None:
    rng = np.random.default_rng(3)
    packed, weights = layouts.random_weights(rng, 64, 50, "int4", "float16")
    x, residual = rng.standard_normal((5, 64), np.float32), rng.standard_normal((5, 50), np.float32)
    bias = rng.standard_normal(50, np.float32)
    found = linear(x, packed, 50, "int4", "block", scale_format="float16", bias=bias, residual=residual)
    check(found, rounded(x, "block") @ weights + bias + residual)


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation(instruction_set: str, activation: str, linear: Linear, layouts: ModuleType) -> None:
    x = np.linspace(-90, 90, 4001, dtype=np.float32).reshape(-1, 1)
    packed = layouts.pack_floats(np.array([[1.0, 0.01]]), "float32")
    found = linear(x, packed, 2, "float32", "float", activation=activation)
    exact = ACTIVATIONS[activation](x.astype(np.float64) * np.array([[1.0, np.float32(0.01)]]))
    np.testing.assert_allclose(found, exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("outputs", [16, 37])
def test_gate(instruction_set: str, outputs: int, linear: Linear, layouts: ModuleType) -> None:
    rng = np.random.default_rng(4)
    gate, gate_weights = layouts.random_weights(rng, 96, outputs, "int8-block", "float32")
    up, up_weights = layouts.random_weights(rng, 96, outputs, "int8-block", "float32")
    x, bias = rng.standard_normal((20, 96), np.float32), rng.standard_normal(2 * outputs, np.float32)
    found = linear(
        x, layouts.alternate(gate, up, outputs), 2 * outputs, "int8-block", "block",
        scale_format="float32", gate="silu", bias=bias,
    )  # fmt: skip
    inputs = rounded(x, "block")
    left, right = inputs @ gate_weights + bias[:outputs], inputs @ up_weights + bias[outputs:]
    check(found, ACTIVATIONS["silu"](left) * right)


def test_row_does_not_depend_on_its_neighbours(
    instruction_set: str, linear: Linear, layouts: ModuleType
) -> None:
    rng = np.random.default_rng(5)
    packed, _ = layouts.random_weights(rng, 160, 40, "int4", "float16")
    x = rng.standard_normal((7, 160), np.float32)
    whole = linear(x, packed, 40, "int4", "block", scale_format="float16")
    for row in range(7):
        alone = linear(x[row : row + 1], packed, 40, "int4", "block", scale_format="float16")
        np.testing.assert_array_equal(alone[0], whole[row])


def test_no_rows(instruction_set: str, linear: Linear, layouts: ModuleType) -> None:
    packed, _ = layouts.random_weights(np.random.default_rng(6), 32, 16, "float32", "")
    assert linear(np.zeros((0, 32), np.float32), packed, 16, "float32", "float").shape == (0, 16)


@pytest.mark.parametrize("form", ["block", "token"])
def test_input_that_is_not_finite_is_not_hidden(
    instruction_set: str, form: str, linear: Linear, layouts: ModuleType
) -> None:
    packed, _ = layouts.random_weights(np.random.default_rng(7), 64, 16, "int8", "")
    x = np.ones((2, 64), np.float32)
    x[1, 40] = np.nan
    found = linear(x, packed, 16, "int8", form)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


def test_weights_of_another_length_are_refused(linear: Linear, layouts: ModuleType) -> None:
    packed, _ = layouts.random_weights(np.random.default_rng(8), 64, 16, "int8", "")
    with pytest.raises(InvalidArgument, match="PackedLinear: weights are not as long"):
        linear(np.ones((1, 64), np.float32), packed[:-1], 16, "int8", "block")


@pytest.mark.parametrize("layout", [*FLOATS, *INTEGERS])
def test_gather(instruction_set: str, layout: str, layouts: ModuleType, run: Run) -> None:
    scale_format = "" if layout in FLOATS or layout == "int8" else "float16"
    packed, weights = layouts.random_weights(np.random.default_rng(9), 50, 37, layout, scale_format)
    ids = np.array([[0, 36], [17, 5]])
    found = run(
        "PackedGather", {"weight": packed, "ids": ids}, 1,
        in_features=50, out_features=37, format=layout, scale_format=scale_format,
    )[0]  # fmt: skip
    np.testing.assert_allclose(found, weights.T[ids], rtol=1e-6)


def test_gather_refuses_ids_outside_of_the_table(instruction_set: str, layouts: ModuleType, run: Run) -> None:
    packed, _ = layouts.random_weights(np.random.default_rng(10), 32, 17, "float32", "")
    with pytest.raises(InvalidArgument, match="token id 17 is outside"):
        run(
            "PackedGather", {"weight": packed, "ids": np.array([17])}, 1,
            in_features=32, out_features=17, format="float32", scale_format="",
        )  # fmt: skip
