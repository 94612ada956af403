"""AWQ: factors by the formula, clips by the outputs' error, and what a trained model gains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.quant.awq import AwqQuantizer, activation_factors, search_factors
from kvgraph.quant.formats import Floats
from kvgraph.quant.layer_graph import Product
from kvgraph.quant.output_error import RoundedProducts
from kvgraph.quant.plan import WeightPart
from kvgraph.quant.quantized_weight import CLIP_RATIOS, QuantizedWeight, quantize_weight
from kvgraph.quant.recipe import load_recipe
from kvgraph.quant.rescaling import Fold
from kvgraph.quant.scheme import ModuleScheme, WeightScheme
from kvgraph.runtime.ort import OrtSession

FLOAT_PERPLEXITY = 6.762
FLOAT32 = np.dtype(np.float32)
INT4 = WeightScheme("int4", 32, clip="mse")


@pytest.fixture(scope="module")
def rows() -> Floats:
    """Inputs of which a few channels are much stronger."""
    random = np.random.default_rng(0)
    result: Floats = random.normal(size=(300, 64)).astype(np.float32)
    result[:, ::16] *= 12
    return result


@pytest.fixture(scope="module")
def weight() -> Floats:
    result: Floats = np.random.default_rng(1).normal(size=(64, 80)).astype(np.float32)
    return result


def output_error(rows: Floats, weight: Floats, quantized: QuantizedWeight) -> float:
    return float(np.square(rows.astype(np.float64) @ (quantized.dequantize() - weight)).sum())


def test_factors_are_mean_magnitudes_to_the_power_of_alpha() -> None:
    mean = np.array([0.5, 2.0, 8.0], np.float32)
    for alpha in (0.0, 0.4, 0.95):
        powers = mean.astype(np.float64) ** alpha
        expected = powers / np.sqrt(powers.max() * powers.min())
        np.testing.assert_allclose(activation_factors(mean, alpha), expected, rtol=1e-5)


def test_channels_that_are_never_active_have_usable_factors() -> None:
    factors = activation_factors(np.array([0.0, 1.0, 0.0], np.float32), 0.8)
    assert np.isfinite(factors).all()
    assert (factors > 0).all()


def test_the_search_spares_strong_inputs(rows: Floats, weight: Floats) -> None:
    products = RoundedProducts(rows, np.abs(rows).max(axis=0), [weight], [ModuleScheme(INT4)], FLOAT32)
    group = Fold("x", (Product("a", "x"),), ("norm.weight",))
    mean = np.abs(rows).mean(axis=0)
    factors = search_factors(group, mean, products)
    assert factors is not None
    assert factors[0] > 1.3 * factors[1]

    def error(s: Floats) -> float:
        quantized = quantize_weight(weight * s[:, None], INT4, FLOAT32, inputs=rows / s)
        return output_error(rows / s, weight * s[:, None], quantized)

    tried = [error(activation_factors(mean, float(alpha))) for alpha in np.linspace(0, 1, 20, endpoint=False)]
    assert error(factors) == pytest.approx(min(tried), rel=1e-3)
    assert error(factors) < 0.95 * tried[0]


def test_inputs_of_one_strength_are_left_alone(weight: Floats) -> None:
    rows = np.random.default_rng(2).choice([-1.0, 1.0], (300, 64)).astype(np.float32)
    products = RoundedProducts(rows, np.ones(64, np.float32), [weight], [ModuleScheme(INT4)], FLOAT32)
    group = Fold("x", (Product("a", "x"),), ("norm.weight",))
    assert search_factors(group, np.abs(rows).mean(axis=0), products) is None


@pytest.mark.parametrize("tokens", [8, 300], ids=["fewer tokens than a block", "more"])
@pytest.mark.parametrize("form", ["int4", "uint4"])
def test_clips_have_the_least_output_error_of_their_block(
    rows: Floats, weight: Floats, tokens: int, form: str
) -> None:
    rows, scheme = rows[:tokens], replace(INT4, format=form)
    found = quantize_weight(weight, scheme, FLOAT32, inputs=rows)
    best = np.full((2, 80), np.inf)
    for ratio in CLIP_RATIOS:
        for block in range(2):
            part = slice(32 * block, 32 * block + 32)
            low, high = weight[part].min(axis=0) * ratio, weight[part].max(axis=0) * ratio
            if form == "int4":
                scale = np.maximum(-low, high) / 7
                rounded = np.clip(np.rint(weight[part] / scale), -8, 7) * scale
            else:
                scale = (np.maximum(high, 0) - np.minimum(low, 0)) / 15
                zero = np.clip(np.rint(-np.minimum(low, 0) / scale), 0, 15)
                rounded = (np.clip(np.rint(weight[part] / scale) + zero, 0, 15) - zero) * scale
            error = np.square(rows[:, part] @ (rounded - weight[part])).sum(axis=0)
            best[block] = np.minimum(best[block], error)
    for block in range(2):
        part = slice(32 * block, 32 * block + 32)
        errors = np.square(rows[:, part] @ (found.dequantize()[part] - weight[part])).sum(axis=0)
        np.testing.assert_allclose(errors, best[block], rtol=2e-3)
    plain = quantize_weight(weight, scheme, FLOAT32)
    assert not np.array_equal(found.scale, plain.scale)


def test_a_module_without_inputs_is_rounded_to_nearest(weight: Floats) -> None:
    part = WeightPart("model.embed_tokens", 0, weight, INT4, FLOAT32)
    found = AwqQuantizer(lambda _: None)(part)
    np.testing.assert_array_equal(found.codes, quantize_weight(weight, INT4, FLOAT32).codes)


def test_four_bit_weights_of_a_trained_model_come_closer_to_the_float_ones(
    stories: Bundle, calibrated: Callable[..., Bundle], perplexity: Callable[[Bundle], float]
) -> None:
    """Each algorithm against round to nearest, at block 32, on held-out text."""
    recipe = load_recipe("int4-wo")
    nearest = perplexity(calibrated(stories, recipe))
    found = {
        algorithm: perplexity(calibrated(stories, replace(recipe, algorithm=algorithm)))
        for algorithm in ("gptq", "awq")
    }
    for value in found.values():
        assert abs(value - FLOAT_PERPLEXITY) < 0.95 * abs(nearest - FLOAT_PERPLEXITY), found


def test_factors_leave_the_function(stories: Bundle, calibrated: Callable[..., Bundle]) -> None:
    """With weights of 8 bits only AWQ's factors could move the logits by much."""
    recipe = replace(load_recipe("int8-wo"), algorithm="awq")
    ids = np.arange(300, 340)[None]
    logits = []
    for bundle in (stories, calibrated(stories, recipe)):
        session = OrtSession(bundle, threads=1)
        cache = session.allocate_cache(1, 40)
        logits.append(session.prefill(cache, ids, np.zeros(1, np.int64), np.arange(40)[None]))
    assert float(np.abs(logits[0] - logits[1]).mean()) < 0.03 * float(logits[0].std())
