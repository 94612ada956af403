from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

# Of the largest result: two products of sums in float32, in another order than NumPy's in float64.
SUMS = 6e-6
# Where one rounding of the inner values to 8 bits falls to the other side, a result moves by up to that much.
ROUNDINGS = 3e-3
FLOATS = ("float32", "float16", "bfloat16")
INTEGERS = ("int8", "int8-block", "int4", "uint4")

Run = Callable[..., list[np.ndarray]]
MakeLayer = Callable[..., "Layer"]


def rounded(x: np.ndarray, form: str) -> np.ndarray:
    """Rows as the operator's description says: int8 in blocks of 32, or by a scale of each row, and back."""
    if form == "float":
        return x
    result = np.zeros(x.shape)
    size = 32 if form == "block" else x.shape[1]
    for start in range(0, x.shape[1], size):
        part = x[:, start : start + size].astype(np.float32)
        scales = np.abs(part).max(axis=1, keepdims=True) / np.float32(127)
        result[:, start : start + size] = np.rint(part / scales) * scales.astype(np.float64)
    return result


class Layer:
    """Experts with random weights: what the operator takes, and its description in float64.

    Args:
        layouts: Writes packed weights.
        sizes: Experts, hidden size, width of an expert.
        layout: Of gates and ups.
        down: Of downs.
        forms: How the inputs of both are rounded.
    """

    def __init__(
        self,
        layouts: ModuleType,
        sizes: tuple[int, int, int],
        layout: str,
        down: str = "",
        form: str = "block",
    ) -> None:
        self.experts, self.hidden, self.size = sizes
        self.rng = np.random.default_rng(sum(sizes))
        self.layouts, down = layouts, down or layout
        self.forms = ["float" if one in FLOATS else form for one in (layout, down)]
        scales = ["" if one in FLOATS or one == "int8" else "float16" for one in (layout, down)]
        gates, ups, downs = [], [], []
        packed: list[list[np.ndarray]] = [[], []]
        for _ in range(self.experts):
            gate, up = (self._weights(self.hidden, self.size, layout, scales[0]) for _ in range(2))
            last = self._weights(self.size, self.hidden, down, scales[1])
            packed[0].append(layouts.alternate(gate[0], up[0], self.size))
            packed[1].append(last[0])
            for found, made in zip((gates, ups, downs), (gate, up, last), strict=True):
                found.append(made[1])
        self.weights = (gates, ups, downs)
        self.packed = [np.concatenate(parts) for parts in packed]
        self.attributes = {
            "num_experts": self.experts, "hidden_size": self.hidden, "intermediate_size": self.size, "gate": "silu",
            "format": layout, "scale_format": scales[0], "input": self.forms[0],
            "down_format": down, "down_scale_format": scales[1], "down_input": self.forms[1],
        }  # fmt: skip

    def _weights(self, inputs: int, outputs: int, layout: str, scale_format: str) -> Any:
        return self.layouts.random_weights(self.rng, inputs, outputs, layout, scale_format)

    def choose(self, shape: tuple[int, ...], top_k: int) -> dict[str, np.ndarray]:
        """Random inputs; every token chooses different experts."""
        rng = np.random.default_rng(top_k)
        order = np.argsort(rng.random((*shape, self.experts)), axis=-1)
        return {
            "x": rng.standard_normal((*shape, self.hidden), np.float32),
            "chosen": np.ascontiguousarray(order[..., :top_k]),
            "shares": rng.random((*shape, top_k), np.float32),
        }

    def run(self, run: Run, given: dict[str, np.ndarray]) -> np.ndarray:
        inputs = {name: given.get(name) for name in ("x", "chosen", "shares")}
        inputs |= {"gate_up": self.packed[0], "down": self.packed[1], "residual": given.get("residual")}
        return run("PackedExperts", inputs, 1, **self.attributes)[0]

    def expected(self, given: dict[str, np.ndarray]) -> np.ndarray:
        x = given["x"].reshape(-1, self.hidden)
        chosen, shares = (given[name].reshape(len(x), -1) for name in ("chosen", "shares"))
        result = np.zeros(x.shape)
        for token, experts in enumerate(chosen):
            row = rounded(x[token : token + 1], self.forms[0])
            for expert, share in zip(experts, shares[token], strict=True):
                gate, up, down = (one[expert] for one in self.weights)
                left = row @ gate
                inner = left / (1 + np.exp(-left)) * (row @ up)
                result[token] += float(share) * (rounded(inner, self.forms[1]) @ down)[0]
        return result.reshape(given["x"].shape) + given.get("residual", 0.0)


def check(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.fixture(scope="module")
def layer_of(layouts: ModuleType) -> MakeLayer:
    """Layers, each of which is packed once: that takes Python long."""
    return functools.cache(functools.partial(Layer, layouts))


# (batch, tokens), experts for each: one token, a batch, prompts of which experts have many rows, one or none.
CHOICES = [((1, 1), 1), ((1, 1), 4), ((3, 1), 2), ((1, 40), 2), ((2, 70), 3)]


@pytest.mark.parametrize("layout", FLOATS)
@pytest.mark.parametrize(("shape", "top_k"), CHOICES)
def test_float_weights(
    instruction_set: str, layout: str, shape: tuple[int, int], top_k: int, layer_of: MakeLayer, run: Run
) -> None:
    layer = layer_of((5, 40, 50), layout)
    given = layer.choose(shape, top_k)
    check(layer.run(run, given), layer.expected(given), SUMS)


@pytest.mark.parametrize("layout", INTEGERS)
@pytest.mark.parametrize(("shape", "top_k"), CHOICES)
def test_integer_weights(
    instruction_set: str, layout: str, shape: tuple[int, int], top_k: int, layer_of: MakeLayer, run: Run
) -> None:
    layer = layer_of((5, 64, 40), layout)
    given = layer.choose(shape, top_k)
    check(layer.run(run, given), layer.expected(given), ROUNDINGS)


def test_a_scale_for_each_token(instruction_set: str, layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((4, 64, 40), "int8", form="token")
    given = layer.choose((1, 30), 2)
    check(layer.run(run, given), layer.expected(given), ROUNDINGS)


@pytest.mark.parametrize(("layout", "down"), [("int4", "int8"), ("float32", "int4"), ("uint4", "bfloat16")])
def test_two_formats(instruction_set: str, layout: str, down: str, layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((4, 64, 40), layout, down)
    given = layer.choose((2, 9), 2)
    check(layer.run(run, given), layer.expected(given), ROUNDINGS)


def test_residual(instruction_set: str, layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((6, 33, 20), "float32")
    given = layer.choose((2, 5), 2)
    given["residual"] = given["x"][::-1].copy()
    check(layer.run(run, given), layer.expected(given), SUMS)


def test_a_long_prompt_is_computed_in_steps(layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((3, 16, 16), "float32")
    # More choices than one step has.
    given = layer.choose((1, 3000), 3)
    check(layer.run(run, given), layer.expected(given), SUMS)


def test_row_does_not_depend_on_its_neighbours(instruction_set: str, layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((4, 96, 64), "int4")
    given = layer.choose((1, 25), 2)
    whole = layer.run(run, given)
    for row in range(25):
        alone = layer.run(run, {name: array[:, row : row + 1] for name, array in given.items()})
        np.testing.assert_array_equal(alone[0, 0], whole[0, row])


def test_experts_that_are_not_chosen_are_not_computed(
    instruction_set: str, layouts: ModuleType, run: Run
) -> None:
    layer = Layer(layouts, (3, 32, 16), "float32")
    layer.packed = [
        np.concatenate([np.full(len(part) // 3, 255, np.uint8), part[len(part) // 3 :]])
        for part in layer.packed
    ]
    given = layer.choose((1, 20), 2)
    # The first expert's weights are not numbers.
    given["chosen"] = np.tile(np.array([2, 1]), (1, 20, 1))
    check(layer.run(run, given), layer.expected(given), SUMS)


def test_no_tokens(layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((3, 32, 16), "int4")
    assert layer.run(run, layer.choose((1, 0), 2)).shape == (1, 0, 32)


@pytest.mark.parametrize("expert", [-1, 3])
def test_an_expert_that_is_none_is_refused(expert: int, layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((3, 32, 16), "int4")
    given = layer.choose((1, 2), 2)
    given["chosen"][0, 1, 1] = expert
    with pytest.raises(InvalidArgument, match=f"PackedExperts: expert {expert} is chosen, expected 0 to 2"):
        layer.run(run, given)


def test_weights_of_another_length_are_refused(layouts: ModuleType, run: Run) -> None:
    layer = Layer(layouts, (3, 32, 16), "int8")
    layer.packed[1] = layer.packed[1][:-1]
    with pytest.raises(InvalidArgument, match="PackedExperts: weights are not as long"):
        layer.run(run, layer.choose((1, 1), 1))


def test_choices_of_other_rows_are_refused(layer_of: MakeLayer, run: Run) -> None:
    layer = layer_of((3, 32, 16), "int8")
    given = layer.choose((1, 2), 1)
    given["chosen"] = given["chosen"][:, :1]
    with pytest.raises(InvalidArgument, match="PackedExperts: chosen experts and their weights"):
        layer.run(run, given)
