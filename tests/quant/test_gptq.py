"""GPTQ against the algorithm that it speeds up, written out, and against rounding to nearest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvgraph.export.bundle import Bundle
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibration_data import check_sequences
from kvgraph.quant.formats import FORMATS, Floats
from kvgraph.quant.gptq import GptqOptions, InputGram, gptq, inverse_factor
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.plan import WeightPart
from kvgraph.quant.quantized_weight import QuantizedWeight, quantize_weight
from kvgraph.quant.scheme import WeightScheme
from kvgraph.quant.sequential_gptq import GptqQuantizer

FLOAT32 = np.dtype(np.float32)
SCHEMES = {
    "int8": WeightScheme("int8"),
    "int4 channel": WeightScheme("int4"),
    "int4 block": WeightScheme("int4", 32),
    "int4 block clipped": WeightScheme("int4", 32, clip="mse"),
    "uint4 block": WeightScheme("uint4", 16),
    "fp8": WeightScheme("float8_e4m3fn"),
    "nvfp4": WeightScheme("float4_e2m1", 16, "float8_e4m3fn"),
    "mxfp4": WeightScheme("float4_e2m1", 32, "power_of_two"),
}


def correlated_inputs(rows: int, channels: int, seed: int = 0) -> Floats:
    """Inputs whose channels depend on one another, of very different sizes."""
    random = np.random.default_rng(seed)
    mixed = random.normal(size=(rows, channels)) @ random.normal(size=(channels, channels))
    result: Floats = (mixed * np.exp(random.normal(size=channels))).astype(np.float32)
    return result


def weights(channels: int, outputs: int, seed: int = 1) -> Floats:
    result: Floats = np.random.default_rng(seed).normal(size=(channels, outputs)).astype(np.float32)
    return result


def output_error(inputs: Floats, weight: Floats, quantized: QuantizedWeight) -> NDArray[np.float64]:
    """Squared error of each output."""
    difference = quantized.dequantize().astype(np.float64) - weight
    result: NDArray[np.float64] = np.square(inputs.astype(np.float64) @ difference).sum(axis=0)
    return result


@pytest.mark.parametrize("size", [1, 5, 64, 65, 200])
def test_the_factor_is_that_of_the_inverse(size: int) -> None:
    inputs = correlated_inputs(3 * size + 10, size)
    gram = inputs.T @ inputs
    order = np.random.default_rng(2).permutation(size)
    damping = 0.05 * float(np.diagonal(gram).mean())
    factor = inverse_factor(gram, order, damping).astype(np.float64)
    damped = gram[np.ix_(order, order)].astype(np.float64) + damping * np.eye(size)
    assert np.array_equal(factor, np.triu(factor))
    np.testing.assert_allclose(factor.T @ factor @ damped, np.eye(size), atol=1e-3)


def optimal_brain_quantizer(
    weight: Floats, gram: Floats, nearest: QuantizedWeight, order: NDArray[np.intp], damping: float
) -> NDArray[np.float64]:
    """The rounded matrix [I, O]: after each input the others are moved by least squares, from the inverse itself."""
    remaining = weight.astype(np.float64)
    result = np.empty_like(remaining)
    block = nearest.scheme.block_size
    damped = gram.astype(np.float64) + damping * np.eye(len(gram))
    for step, index in enumerate(order):
        left = order[step:]
        inverse = np.linalg.inv(damped[np.ix_(left, left)])
        scale = (nearest.scale if block is None else nearest.scale[index // block]).astype(np.float64)
        form = FORMATS[nearest.scheme.format]
        codes = form.nearest((remaining[index] / scale).astype(np.float32))
        result[index] = codes * scale
        error = (remaining[index] - result[index]) / inverse[0, 0]
        remaining[left] -= np.outer(inverse[:, 0], error)
    return result


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("block_size", [1, 7, 128])
@pytest.mark.parametrize("scheme", ["int8", "int4 block", "fp8"])
def test_codes_are_those_of_least_squares_step_by_step(scheme: str, block_size: int, act_order: bool) -> None:
    channels = 48
    inputs, weight = correlated_inputs(400, channels), weights(channels, 24)
    gram = inputs.T @ inputs
    nearest = quantize_weight(weight, SCHEMES[scheme], FLOAT32)
    found, _ = gptq(weight, SCHEMES[scheme], FLOAT32, InputGram(gram, GptqOptions(act_order, block_size)))
    order = np.argsort(-np.diagonal(gram), kind="stable") if act_order else np.arange(channels)
    damping = GptqOptions().damping * float(np.diagonal(gram).mean())
    expected = optimal_brain_quantizer(weight, gram, nearest, order, damping)
    same = np.isclose(found.dequantize(), expected, rtol=1e-5)
    # Where a value lies between two codes float32 may choose the other one, and the rest of the output follows; and an
    # output that this would make worse keeps the nearest codes.
    assert same.all(axis=0).mean() > 0.8
    assert same.mean() > 0.95


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("act_order", [True, False])
def test_no_output_is_worse_than_rounded_to_nearest(name: str, act_order: bool) -> None:
    scheme = SCHEMES[name]
    inputs, weight = correlated_inputs(600, 96), weights(96, 40)
    nearest = quantize_weight(weight, scheme, FLOAT32)
    found, better = gptq(weight, scheme, FLOAT32, InputGram(inputs.T @ inputs, GptqOptions(act_order)))
    before, after = output_error(inputs, weight, nearest), output_error(inputs, weight, found)
    assert (after <= before * (1 + 1e-4)).all()
    assert after.sum() < (0.5 if act_order else 0.8) * before.sum()
    assert better.mean() > 0.9
    assert found.codes.dtype == nearest.codes.dtype
    assert found.scale.shape == nearest.scale.shape


def test_an_output_that_gets_worse_keeps_the_nearest_codes() -> None:
    """With all weight on the damping, or on few tokens, what is made up for is not there."""
    inputs, weight = correlated_inputs(600, 64), weights(64, 200)
    nearest = quantize_weight(weight, WeightScheme("int4"), FLOAT32)
    # Other inputs than the matrix will meet.
    wrong = InputGram(
        correlated_inputs(600, 64, seed=9).T @ correlated_inputs(600, 64, seed=9), GptqOptions()
    )
    right = InputGram(inputs.T @ inputs, GptqOptions())
    right.__dict__["factor"], right.__dict__["order"] = wrong.factor, wrong.order
    found, better = gptq(weight, nearest.scheme, FLOAT32, right)
    kept = ~better
    assert kept.any()
    np.testing.assert_array_equal(found.codes[:, kept], nearest.codes[:, kept])
    before, after = output_error(inputs, weight, nearest), output_error(inputs, weight, found)
    assert (after <= before * (1 + 1e-4)).all()


def test_inputs_that_say_nothing_of_each_other_are_rounded_to_nearest() -> None:
    weight = weights(64, 16)
    nearest = quantize_weight(weight, SCHEMES["int4 block"], FLOAT32)
    inputs = InputGram(np.diag(np.arange(1, 65)).astype(np.float32), GptqOptions())
    found, _ = gptq(weight, nearest.scheme, FLOAT32, inputs)
    np.testing.assert_array_equal(found.codes, nearest.codes)


@pytest.mark.parametrize("dead", [[3], list(range(0, 64, 2)), list(range(64))])
def test_inputs_that_are_never_active_are_rounded_to_nearest(dead: list[int]) -> None:
    inputs, weight = correlated_inputs(300, 64), weights(64, 16)
    inputs[:, dead] = 0
    nearest = quantize_weight(weight, SCHEMES["int8"], FLOAT32)
    found, _ = gptq(weight, nearest.scheme, FLOAT32, InputGram(inputs.T @ inputs, GptqOptions()))
    np.testing.assert_array_equal(found.codes[dead], nearest.codes[dead])
    assert np.isfinite(found.dequantize()).all()


def test_more_inputs_than_tokens_are_damped_until_they_can_be_solved() -> None:
    inputs, weight = correlated_inputs(5, 80), weights(80, 8)
    inputs *= 1e4
    nearest = quantize_weight(weight, SCHEMES["int4 channel"], FLOAT32)
    gram = InputGram(inputs.T @ inputs, GptqOptions(damping=1e-12))
    found, _ = gptq(weight, nearest.scheme, FLOAT32, gram)
    before, after = output_error(inputs, weight, nearest), output_error(inputs, weight, found)
    assert (after <= before * (1 + 1e-4)).all()


def test_layers_are_rounded_on_what_the_rounded_ones_before_them_give(
    tiny: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The X^T X of every module is that of the model with all earlier layers' weights replaced by rounded ones."""
    random = np.random.default_rng(0)
    data = check_sequences([random.integers(0, 97, 40) for _ in range(3)], tiny, "test")
    scheme = WeightScheme("int4", 16)
    with BundleWeights(tiny) as file:
        model = LayerwiseModel(tiny, file, data)
        modules = [name for name in model.graph.pieces_by_module() if name != "lm_head"]
        quantizer = GptqQuantizer(model, modules, {}, tmp_path)
        rounded: dict[str, Floats] = {}
        grams: dict[str, Floats] = {}
        for module in modules:
            weight = np.asarray(file.read(f"{module}.weight"), np.float32)
            half = weight.shape[1] // 2
            parts = [
                quantizer(WeightPart(module, start, weight[:, start : start + half], scheme, FLOAT32))
                for start in (0, half)
            ]
            rounded[f"{module}.weight"] = np.concatenate([part.dequantize() for part in parts], axis=1)
            grams[module] = quantizer._inputs[module].gram
        own = LayerwiseModel.layer_weights
        expected: dict[str, Floats] = {}
        for layer in range(2):
            piece = model.graph.layer(layer)
            earlier = {name: value for name, value in rounded.items() if f"layers.{layer}." not in name}
            monkeypatch.setattr(
                LayerwiseModel,
                "layer_weights",
                lambda self, piece, earlier=earlier: {**own(self, piece), **_among(piece, earlier)},
            )
            collector = GptqQuantizer(model, modules, {}, tmp_path)
            collector._advance(layer)
            expected |= {name: collector._inputs[name].gram for name in modules if f".{layer}." in name}
            assert piece.name == f"layers.{layer}"
    for module in modules:
        np.testing.assert_allclose(grams[module], expected[module], rtol=1e-4, atol=1e-3)
    assert not np.allclose(rounded["model.layers.0.mlp.up_proj.weight"], 0)


def _among(piece: object, values: dict[str, Floats]) -> dict[str, Floats]:
    names = piece.parameters  # type: ignore[attr-defined]
    return {name: value for name, value in values.items() if name in names}


def test_tables_are_rounded_to_nearest(tiny: Bundle, tmp_path: Path) -> None:
    data = check_sequences([np.arange(40)], tiny, "test")
    with BundleWeights(tiny) as file:
        quantizer = GptqQuantizer(LayerwiseModel(tiny, file, data), [], {}, tmp_path)
        weight = weights(20, 97)
        part = WeightPart("model.embed_tokens", 0, weight, WeightScheme("int8"), FLOAT32)
        np.testing.assert_array_equal(
            quantizer(part).codes, quantize_weight(weight, WeightScheme("int8"), FLOAT32).codes
        )


def test_the_float_model_waits_in_no_file_that_stays(tiny: Bundle, tmp_path: Path) -> None:
    data = check_sequences([np.arange(40)], tiny, "test")
    with BundleWeights(tiny) as file:
        quantizer: Callable[[WeightPart], QuantizedWeight] | None = GptqQuantizer(
            LayerwiseModel(tiny, file, data), ["model.layers.1.mlp.up_proj"], {}, tmp_path
        )
        assert quantizer is not None
        quantizer(WeightPart("model.layers.1.mlp.up_proj", 0, weights(20, 44), WeightScheme("int8"), FLOAT32))
        assert list(tmp_path.glob("*/stream.1"))
        del quantizer
        assert not list(tmp_path.iterdir())
