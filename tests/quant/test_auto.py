"""Choosing schemes by measured divergence: the budget against exhaustive search, the measure against whole models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.quant.auto import choose_schemes, mean_weight_bits, measure_divergences
from kvgraph.quant.bit_budget import Choice, Option, spend_bits
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibration_data import check_sequences, read_calibration
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.plan import GraphPlan, QuantizationPlan, parse_plan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import Override, load_recipe
from kvgraph.quant.scheme import ActivationScheme, ModuleScheme, WeightScheme
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

INT4 = ModuleScheme(WeightScheme("int4", 16))
INT8 = ModuleScheme(WeightScheme("int8"))
STATIC = ModuleScheme(WeightScheme("int8"), ActivationScheme("int8", "tensor"))
DYNAMIC = ModuleScheme(WeightScheme("int8"), ActivationScheme("int8", "token"))
MODULES = ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj", "lm_head")


def random_choices(seed: int) -> list[Choice]:
    random = np.random.default_rng(seed)
    choices = []
    for _ in range(6):
        bits = (4.5, 8.0, 16.0)
        divergences = sorted(random.exponential(size=2), reverse=True)
        # Not every module gets better with more bits.
        if random.random() < 0.3:
            divergences.reverse()
        options = [Option(*pair) for pair in zip(bits, [*divergences, 0.0], strict=True)]
        choices.append(Choice(int(random.integers(1, 5)) * 100, options))
    return choices


def totals(choices: list[Choice], taken: tuple[int, ...] | list[int]) -> tuple[float, float]:
    """Mean bits and divergence of all modules."""
    chosen = [choice.options[index] for choice, index in zip(choices, taken, strict=True)]
    weights = [choice.parameters for choice in choices]
    bits = float(np.average([option.bits for option in chosen], weights=weights))
    return bits, sum(option.divergence for option in chosen)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("budget", [4.5, 6.0, 9.0, 16.0])
def test_bits_are_spent_nearly_as_well_as_can_be(seed: int, budget: float) -> None:
    choices = random_choices(seed)
    bits, divergence = totals(choices, spend_bits(choices, budget))
    assert bits <= budget + 1e-9
    every = itertools.product(range(3), repeat=len(choices))
    affordable = [total for taken in every if (total := totals(choices, taken))[0] <= budget + 1e-9]
    best = min(divergence for _, divergence in affordable)
    cheapest = totals(choices, [0] * len(choices))[1]
    # What a greedy choice may lose is less than one module's step.
    assert divergence <= best + 0.25 * (cheapest - best) + 1e-9
    if budget == 16.0:
        assert divergence == pytest.approx(0.0)


def test_too_small_a_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 bits a weight are too few: the recipe's own schemes take 4\.5"):
        spend_bits(random_choices(0), 4)


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (None, 16),
        (INT8, 8 + 16 / 64),
        (ModuleScheme(WeightScheme("int4", 32)), 4 + 16 / 32),
        (ModuleScheme(WeightScheme("uint4", 32)), 4 + 20 / 32),
        (ModuleScheme(WeightScheme("float4_e2m1", 16, "float8_e4m3fn")), 4 + 8 / 16),
    ],
)
def test_bits_count_scales_and_zero_points(scheme: ModuleScheme | None, bits: float) -> None:
    assert mean_weight_bits(scheme, 64, 16) == pytest.approx(bits)


@pytest.fixture(scope="module")
def ids() -> Ids:
    return np.random.default_rng(8).integers(0, 97, (3, 24))


@pytest.fixture(scope="module")
def model(tiny: Bundle, ids: Ids) -> Iterator[LayerwiseModel]:
    with BundleWeights(tiny) as weights:
        yield LayerwiseModel(tiny, weights, check_sequences(list(ids), tiny, "test"))


def log_probabilities(session: OrtSession, ids: Ids) -> Floats:
    rows, length = ids.shape
    positions = np.tile(np.arange(length), (rows, 1))
    logits = session.prefill(session.allocate_cache(rows, length), ids, np.zeros(rows, np.int64), positions)
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


@pytest.mark.parametrize("scheme", [INT4, INT8, STATIC, DYNAMIC], ids=["int4", "int8", "static", "dynamic"])
def test_divergence_is_that_of_a_bundle_with_one_module_quantized(
    tiny: Bundle,
    model: LayerwiseModel,
    ids: Ids,
    run_exactly: Callable[[Bundle], OrtSession],
    tmp_path: Path,
    scheme: ModuleScheme,
) -> None:
    scales = dict.fromkeys(MODULES, 0.05)
    found = measure_divergences(
        model,
        GraphPlan(load_recipe("int8-wo"), activation_scales=scales),
        {module: [scheme, None] for module in MODULES},
    )
    exact = log_probabilities(run_exactly(tiny), ids)
    for module in MODULES:
        keep_all = Override("*", None)
        recipe = replace(load_recipe("int8-wo"), name="one", overrides=(keep_all, Override(module, scheme)))
        graph = GraphPlan(recipe, activation_scales=scales)
        bundle = quantize_bundle(tiny, QuantizationPlan(graph, graph), tmp_path / module)
        rounded = log_probabilities(run_exactly(bundle), ids)
        expected = float((np.exp(exact) * (exact - rounded)).sum(axis=-1).mean())
        assert expected > 1e-6
        assert found[module, scheme] == pytest.approx(expected, rel=0.1)


def test_sensitive_modules_get_more_bits(
    stories: Bundle,
    story_file: Path,
    tmp_path: Path,
    perplexity: Callable[[Bundle], float],
    calibrated: Callable[..., Bundle],
) -> None:
    """With a bit more a weight the model is closer to the float one, and every override is a finer scheme."""
    plan = parse_plan("int4-wo")
    with BundleWeights(stories) as weights:
        model = LayerwiseModel(stories, weights, read_calibration(story_file, stories))
        chosen = choose_schemes(model, plan, 6.5, tmp_path)
        assert chosen.prefill is chosen.decode
        recipe = chosen.prefill.recipe
        assert recipe.name == "int4-wo-auto6.5"
        assert 0 < len(recipe.overrides) < 35
        assert all(override.scheme in (INT8, None) for override in recipe.overrides)
        bits, count = 0.0, 0
        for module in model.graph.pieces_by_module():
            if (scheme := recipe.module_scheme(module)) is not None:
                inputs, outputs = weights.shape(f"{module}.weight")
                bits += inputs * outputs * mean_weight_bits(scheme, inputs, 32)
                count += inputs * outputs
    assert bits / count <= 6.5
    plain, mixed = (
        perplexity(calibrated(stories, plan.prefill.recipe)),
        perplexity(calibrated(stories, recipe)),
    )
    assert abs(mixed - 6.762) < 0.6 * abs(plain - 6.762)


@pytest.mark.parametrize(
    ("recipe", "bits", "message"),
    [
        ("prefill=int8-wo,decode=int4-wo", 6, "--auto goes with one recipe for both graphs"),
        ("int4-wo", 2, "2 bits a weight are too few"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    model: LayerwiseModel, tmp_path: Path, recipe: str, bits: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_schemes(model, parse_plan(recipe), bits, tmp_path)


def test_a_recipe_that_quantizes_nothing_has_nothing_to_choose(model: LayerwiseModel, tmp_path: Path) -> None:
    graph = GraphPlan(replace(load_recipe("int8-wo"), linear=None))
    with pytest.raises(ValueError, match="quantizes no matrix"):
        choose_schemes(model, QuantizationPlan(graph, graph), 8, tmp_path)
