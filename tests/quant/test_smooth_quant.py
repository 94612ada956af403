"""SmoothQuant: its formula, its search, and what it does for a model with an outlier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import past_value
from kvgraph.quant.formats import Floats
from kvgraph.quant.layer_graph import LayeredGraph, Product
from kvgraph.quant.output_error import RoundedProducts, round_inputs
from kvgraph.quant.recipe import Recipe, load_recipe
from kvgraph.quant.rescaling import Fold
from kvgraph.quant.scheme import ActivationScheme, ModuleScheme, WeightScheme
from kvgraph.quant.smooth_quant import fold_factors, search_factors, smoothing_factors
from kvgraph.runtime.ort import OrtSession

FLOAT_PERPLEXITY = 6.762
W8A8 = ModuleScheme(WeightScheme("int8"), ActivationScheme("int8", "tensor"))
FP8 = ModuleScheme(WeightScheme("float8_e4m3fn"), ActivationScheme("float8_e4m3fn", "tensor"))

Calibrated = Callable[..., Bundle]
Perplexity = Callable[[Bundle], float]


def fold(*modules: str) -> Fold:
    return Fold("x", tuple(Product(module, "x") for module in modules), ("norm.weight",))


@pytest.fixture(scope="module")
def outlying() -> RoundedProducts:
    """Two products of an input one of whose channels is a hundred times the others."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(256, 48)).astype(np.float32)
    rows[:, 5] *= 100
    weights = [random.normal(size=(48, outputs)).astype(np.float32) / 7 for outputs in (32, 24)]
    return RoundedProducts(rows, np.abs(rows).max(axis=0), weights, [W8A8, W8A8], np.dtype(np.float32))


def test_factors_are_the_formula() -> None:
    inputs, weights = np.array([4.0, 0.25, 9.0], np.float32), np.array([1.0, 4.0, 0.01], np.float32)
    expected = [
        [4.0**alpha / 1.0, 0.25**alpha / 4.0 ** (1 - alpha), 9.0**alpha / 0.01 ** (1 - alpha)]
        for alpha in (0, 0.3, 1)
    ]
    for alpha, factors in zip((0.0, 0.3, 1.0), expected, strict=True):
        np.testing.assert_allclose(smoothing_factors(inputs, weights, alpha), factors, rtol=1e-6)


def test_channels_without_use_keep_their_scale() -> None:
    factors = smoothing_factors(np.array([0, 3, 0], np.float32), np.array([2, 0, 0], np.float32), 0.5)
    np.testing.assert_array_equal(factors, np.ones(3))
    extreme = smoothing_factors(np.array([1e30, 1e-30], np.float32), np.array([1e-30, 1e30], np.float32), 0.5)
    assert np.isfinite(extreme).all()
    assert (extreme > 0).all()


def test_a_group_is_smoothed_by_its_largest_weights(outlying: RoundedProducts) -> None:
    found = fold_factors(fold("a", "b"), outlying.largest, outlying.weights, 0.5)
    peaks = np.maximum(*(np.abs(weight).max(axis=1) for weight in outlying.weights))
    np.testing.assert_allclose(found, np.sqrt(outlying.largest / peaks), rtol=1e-6)


def relative_error(products: RoundedProducts, factors: Floats | None) -> list[float]:
    """Of each product, in float64: inputs / s by one scale, weights * s by one for each output."""
    errors = []
    s = np.ones(products.rows.shape[1]) if factors is None else factors.astype(np.float64)
    for weight in products.weights:
        exact = products.rows.astype(np.float64) @ weight
        scaled = weight * s[:, None]
        steps = np.abs(scaled).max(axis=0) / 127
        step = (products.largest / s).max() / 127
        rounded = np.rint(products.rows / s / step) * step @ (np.rint(scaled / steps) * steps)
        errors.append(float(np.square(rounded - exact).sum() / np.square(exact).sum()))
    return errors


def test_the_error_is_that_of_the_rounded_products(outlying: RoundedProducts) -> None:
    for factors in (None, fold_factors(fold("a", "b"), outlying.largest, outlying.weights, 0.5)):
        expected = float(np.log(relative_error(outlying, factors)).sum())
        assert outlying.error(factors) == pytest.approx(expected, abs=0.05)


def test_the_search_finds_the_best_alpha(outlying: RoundedProducts) -> None:
    group = fold("a", "b")
    found = search_factors(group, outlying)
    assert found is not None
    candidates = [
        fold_factors(group, outlying.largest, outlying.weights, alpha) for alpha in np.linspace(0, 1, 21)
    ]
    errors = [np.log(relative_error(outlying, factors)).sum() for factors in candidates]
    best = np.log(relative_error(outlying, found)).sum()
    assert best <= min(errors) + 0.05
    assert best < np.log(relative_error(outlying, None)).sum() - 4


def test_the_search_leaves_alone_what_it_cannot_improve(outlying: RoundedProducts) -> None:
    even = replace(outlying, rows=np.sign(outlying.rows), largest=np.ones(48, np.float32))
    even = replace(even, weights=[np.sign(weight) for weight in outlying.weights])
    assert search_factors(fold("a", "b"), even) is None


@pytest.mark.parametrize("granularity", ["tensor", "token"])
def test_inputs_are_rounded_as_graphs_do(granularity: str) -> None:
    rows = np.array([[1.0, -127.0], [0.0, 0.0], [3.0, 0.4]], np.float32)
    scheme = ActivationScheme("int8", granularity)  # type: ignore[arg-type]
    found = round_inputs(rows, 127.0, scheme)
    last = [3.0, 0.0] if granularity == "tensor" else [3.0, np.rint(0.4 / 3 * 127) * 3 / 127]
    np.testing.assert_allclose(found, [[1.0, -127.0], [0.0, 0.0], last], rtol=1e-6)


def rescalings(bundle: Bundle, graph: str) -> dict[str, Floats]:
    """What every float vector of a graph has been multiplied by, and every matrix that is still float."""
    model = ir.load(bundle.graph_path(graph))  # type: ignore[arg-type]
    return {
        name: value.const_value.numpy().astype(np.float32)
        for name, value in model.graph.initializers.items()
        if "layernorm" in name and value.const_value is not None
    }


@pytest.mark.parametrize(
    ("recipe", "most"),
    [("int8-sq", 0.02), ("fp8", 0.02)],
)
def test_w8a8_keeps_the_perplexity_of_a_trained_model(
    stories: Bundle, calibrated: Calibrated, perplexity: Perplexity, recipe: str, most: float
) -> None:
    assert perplexity(stories) == pytest.approx(FLOAT_PERPLEXITY, abs=0.002)
    assert perplexity(calibrated(stories, load_recipe(recipe))) == pytest.approx(FLOAT_PERPLEXITY, rel=most)


def test_an_outlier_breaks_plain_w8a8_and_not_smoothed(
    outlier_model: Bundle, calibrated: Calibrated, perplexity: Perplexity
) -> None:
    recipe = load_recipe("int8-sq")
    assert perplexity(outlier_model) == pytest.approx(FLOAT_PERPLEXITY, abs=0.002)
    plain = calibrated(outlier_model, replace(recipe, name="int8-plain", smooth_quant=None))
    assert perplexity(plain) > 2 * FLOAT_PERPLEXITY
    assert perplexity(calibrated(outlier_model, recipe)) == pytest.approx(FLOAT_PERPLEXITY, rel=0.02)


def test_only_the_graph_that_asks_for_it_changes(stories: Bundle, calibrated: Calibrated) -> None:
    """Norms of prefill are divided by s, decode's are the checkpoint's; values in the cache are the same for both."""
    split = calibrated(stories, load_recipe("int8-sq"), load_recipe("int4-wo"))
    original = rescalings(stories, "decode")
    decode = rescalings(split, "decode")
    assert len(original) == 10
    for name, norm in original.items():
        np.testing.assert_array_equal(decode[f"decode.{name}"], norm)
        assert not np.allclose(rescalings(split, "prefill")[f"prefill.{name}"], norm)


def cached_values(bundle: Bundle) -> Floats:
    """Values of the first layer [K, T, D] after a prompt."""
    session = OrtSession(bundle, threads=1)
    ids = np.arange(300, 340)[None]
    cache = session.allocate_cache(1, 40)
    session.prefill(cache, ids, np.zeros(1, np.int64), np.full((1, 1), 39))
    return cache.read(past_value(0))[0]


def test_factors_reach_the_cache_only_where_both_graphs_know_them(
    stories: Bundle, calibrated: Calibrated
) -> None:
    exact = cached_values(stories)
    split = cached_values(calibrated(stories, load_recipe("int8-sq"), load_recipe("int4-wo")))
    shared = cached_values(calibrated(stories, load_recipe("int8-sq")))

    def ratios(values: Floats) -> Floats:
        """Least-squares factor of every channel [K, D]."""
        return (values * exact).sum(axis=1) / np.square(exact).sum(axis=1)

    np.testing.assert_allclose(ratios(split), 1, atol=0.05)
    assert np.abs(np.log(np.abs(ratios(shared)))).max() > 0.2


@pytest.mark.parametrize("smooth_quant", [0.5, "search"])
def test_smoothing_and_awq_are_not_asked_for_together(
    stories: Bundle, calibrated: Calibrated, smooth_quant: float
) -> None:
    recipe = Recipe("both", linear=W8A8, smooth_quant=smooth_quant, algorithm="awq")
    with pytest.raises(ValueError, match="smooth_quant and algorithm awq choose the same factors"):
        calibrated(stories, recipe)


def test_smoothed_weights_are_proven_against_the_smoothed_source(
    stories: Bundle, calibrated: Calibrated
) -> None:
    bundle = calibrated(stories, load_recipe("int8-sq"))
    assert bundle.quantization is not None
    assert all(module["snr_db"] > 30 for module in bundle.quantization["modules"])
    graph = LayeredGraph(ir.load(stories.graph_path("prefill")), stories.weights.keys(), 5)
    modules = {product.module for layer in range(5) for product in graph.layer(layer).products}
    assert {module["module"] for module in bundle.quantization["modules"]} == modules
