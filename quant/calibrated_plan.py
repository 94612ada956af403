"""What calibration adds to a plan: scales of inputs, ranges of the cache, factors, quantizers that look at data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvgraph.export.contract import GRAPHS, past_key, past_value
from kvgraph.quant import awq, smooth_quant
from kvgraph.quant.activation_ranges import choose_scale
from kvgraph.quant.bundle_weights import NUMPY_TYPES
from kvgraph.quant.cache_ranges import UNROTATED_HEADROOM, VALUE_HEADROOM, choose_cache_range
from kvgraph.quant.calibration import StatisticsReader, cache_directory, collect_statistics
from kvgraph.quant.formats import Floats
from kvgraph.quant.gptq import GptqOptions
from kvgraph.quant.layer_graph import HEAD, Piece, Product
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.output_error import RoundedProducts
from kvgraph.quant.plan import (
    CacheRange,
    GraphPlan,
    QuantizationPlan,
    Rescaling,
    WeightQuantizer,
    needs_statistics,
)
from kvgraph.quant.recipe import Recipe
from kvgraph.quant.rescaling import Fold, add_rescaling, find_folds
from kvgraph.quant.scheme import ActivationScheme, CacheScheme
from kvgraph.quant.sequential_gptq import GptqQuantizer
from kvgraph.quant.statistics import CacheStatistics, InputStatistics, LayerStatistics

# Rotated keys are bounded by the lengths of their pairs.
_HEADROOM = {"key": 1.0, "value": VALUE_HEADROOM, "unrotated_key": UNROTATED_HEADROOM}


@dataclass(frozen=True, slots=True)
class _Findings:
    """What is found for one recipe, layer by layer.

    Attributes:
        recipe: What asks for it.
        scales: Module -> scale of its input.
        rescalings: Stored tensor -> its factors.
        value_factors: Piece -> factors [K * D] that its cached values are divided by.
    """

    recipe: Recipe
    scales: dict[str, float] = field(default_factory=dict)
    rescalings: dict[str, Rescaling] = field(default_factory=dict)
    value_factors: dict[str, Floats] = field(default_factory=dict)


def calibrate_plan(
    model: LayerwiseModel, plan: QuantizationPlan, parent: Path, gptq: GptqOptions | None = None
) -> QuantizationPlan:
    """A plan with everything that its recipes need data for.

    Args:
        model: The float bundle with its calibration data.
        plan: From `parse_plan`.
        parent: Where statistics are kept, to go on with or to use again.
        gptq: How GPTQ runs where a recipe asks for it.

    Raises:
        ValueError: The recipes contradict themselves or each other, or an activation is not finite.
    """
    shared = plan.prefill is plan.decode
    graphs = [plan.prefill] if shared else [plan.prefill, plan.decode]
    _check(plan)
    found = [_Findings(graph.recipe) for graph in graphs]
    directory = cache_directory(parent, model)
    cache_ranges: dict[str, CacheRange] = {}
    if any(needs_statistics(graph.recipe) for graph in graphs):
        for piece, statistics in collect_statistics(model, directory):
            for findings in found:
                _decide(findings, piece, statistics, model, through_cache=shared)
            if (cache := plan.prefill.recipe.kv_cache) is not None:
                cache_ranges |= _cache_ranges(cache, piece, statistics, found[0])
    done = [_complete(*pair, model, directory, gptq) for pair in zip(graphs, found, strict=True)]
    return QuantizationPlan(done[0], done[-1], cache_ranges)


def _check(plan: QuantizationPlan) -> None:
    for recipe in (plan.graph(graph).recipe for graph in GRAPHS):
        if recipe.smooth_quant is not None and recipe.algorithm == "awq":
            raise ValueError(
                f"recipe {recipe.name!r}: smooth_quant and algorithm awq choose the same factors; leave one out"
            )
    first, second = (plan.graph(graph).recipe.kv_cache for graph in GRAPHS)
    if first != second:
        raise ValueError(
            f"recipes {plan.name}: kv_cache is {first} for prefill and {second} for decode; both graphs read one cache"
        )


def _decide(
    found: _Findings, piece: Piece, statistics: LayerStatistics, model: LayerwiseModel, through_cache: bool
) -> None:
    """Factors, then scales, of a piece.

    Factors that reach the cache go into both graphs or into none (`through_cache`): what one writes, the other reads.
    """
    recipe = found.recipe
    rounds = any(recipe.module_scheme(product.module) is not None for product in piece.products)
    if rounds and (recipe.smooth_quant is not None or recipe.algorithm == "awq"):
        if piece.name == HEAD:
            # Run for the input of its product alone, it lacks the product.
            piece = model.graph.head(with_logits=True)
        weights = model.layer_weights(piece)
        # Backwards, so that a producer's weights are what they will be when they are products themselves.
        for fold in reversed(find_folds(piece)):
            if through_cache or not fold.through_cache:
                inputs = statistics.inputs[fold.input]
                factors = _fold_factors(recipe, fold, inputs, weights, NUMPY_TYPES[model.bundle.dtype])
                if factors is not None:
                    _apply(found, fold, factors, piece, weights)
    for name, products in piece.product_inputs().items():
        _choose_scales(found, products, statistics.inputs[name])


def _fold_factors(
    recipe: Recipe,
    fold: Fold,
    inputs: InputStatistics,
    weights: dict[str, Floats],
    scale_dtype: np.dtype[np.generic],
) -> Floats | None:
    """The factors s of a fold's producer channels that the recipe's algorithm chooses."""
    schemes = [recipe.module_scheme(product.module) for product in fold.products]
    matrices = [weights[product.weight] for product in fold.products]
    products = RoundedProducts(inputs.rows, inputs.largest, matrices, schemes, scale_dtype)
    if recipe.algorithm == "awq":
        return awq.search_factors(fold, inputs.mean, products) if any(schemes) else None
    if not any(scheme is not None and scheme.activation is not None for scheme in schemes):
        return None
    if isinstance(recipe.smooth_quant, float):
        return smooth_quant.fold_factors(fold, inputs.largest, matrices, recipe.smooth_quant)
    return smooth_quant.search_factors(fold, products)


def _apply(found: _Findings, fold: Fold, factors: Floats, piece: Piece, weights: dict[str, Floats]) -> None:
    add_rescaling(found.rescalings, fold, factors)
    if fold.through_cache:
        found.value_factors[piece.name] = factors
    for name in fold.producers:
        weights[name] = weights[name] / factors
    for product in fold.products:
        weights[product.weight] = weights[product.weight] * fold.spread(factors)[:, None]


def _choose_scales(found: _Findings, products: list[Product], inputs: InputStatistics) -> None:
    """The one scale of an input, for every product whose scheme has one."""
    known: dict[ActivationScheme, float] = {}
    for product in products:
        scheme = found.recipe.module_scheme(product.module)
        if scheme is None or scheme.activation is None or scheme.activation.granularity != "tensor":
            continue
        rescaling = found.rescalings.get(product.weight)
        factors = np.float32(1) if rescaling is None or rescaling.inputs is None else rescaling.inputs
        if scheme.activation not in known:
            largest = float((inputs.largest / factors).max())
            known[scheme.activation] = choose_scale(inputs.rows / factors, largest, scheme.activation)
        found.scales[product.module] = known[scheme.activation]


def _cache_ranges(
    scheme: CacheScheme, piece: Piece, statistics: LayerStatistics, found: _Findings
) -> dict[str, CacheRange]:
    """Offsets and scales of a layer's keys and values."""
    ranges = {}
    unrotated = scheme.keys == "unrotated" and "unrotated_key" in statistics.cache
    for role in ("unrotated_key" if unrotated else "key", "value") if statistics.cache else ():
        kept = statistics.cache[role]
        if role == "value" and piece.name in found.value_factors:
            factors = found.value_factors[piece.name].reshape(kept.mean.shape)
            parts = (kept.low, kept.high, kept.mean, kept.length)
            low, high, mean, length = (part / factors for part in parts)
            kept = CacheStatistics(low, high, mean, length, kept.turned)
        name = past_value(piece.layer) if role == "value" else past_key(piece.layer)
        chosen = choose_cache_range(kept, scheme, role != "value", _HEADROOM[role])
        ranges[name] = replace(chosen, unrotated=role == "unrotated_key")
    return ranges


def _complete(
    graph: GraphPlan, found: _Findings, model: LayerwiseModel, directory: Path, gptq: GptqOptions | None
) -> GraphPlan:
    """A graph's plan with what was found for it."""
    quantizer: WeightQuantizer = graph.weight_quantizer
    if found.recipe.algorithm == "gptq":
        modules = [name for name in model.graph.pieces_by_module() if found.recipe.module_scheme(name)]
        quantizer = GptqQuantizer(model, modules, found.rescalings, directory, gptq)
    elif found.recipe.algorithm == "awq":
        quantizer = awq.AwqQuantizer(_rescaled_rows(StatisticsReader(model, directory), found.rescalings))
    return replace(
        graph, weight_quantizer=quantizer, activation_scales=found.scales, rescalings=found.rescalings
    )


def _rescaled_rows(
    reader: StatisticsReader, rescalings: dict[str, Rescaling]
) -> Callable[[str], Floats | None]:
    """Some inputs of a module, divided by its factors; None where it is no product of a layer or the head."""

    def rows(module: str) -> Floats | None:
        inputs = reader.inputs(module)
        if inputs is None:
            return None
        rescaling = rescalings.get(f"{module}.weight")
        if rescaling is None or rescaling.inputs is None:
            return inputs.rows
        return inputs.rows / rescaling.inputs

    return rows
