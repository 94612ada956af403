"""`--auto BITS`: which modules get the recipe's scheme, which a finer one, and which stay float.

Every module is rounded alone, by each of the schemes that it could have, and what that does to the model's next-token
distribution is measured on some of the calibration data. All these variants of the residual stream go through the
layers together, so that every layer is read once. Then the schemes with little divergence in all are chosen whose mean
bits, scales included, are within the budget.

Embedding tables and stacked experts keep what the recipe gives them.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from tqdm import tqdm

from kvgraph.export.contract import LOGITS, hidden_state
from kvgraph.export.weight_kinds import element_bits
from kvgraph.quant.bit_budget import Choice, Option, spend_bits
from kvgraph.quant.bundle_weights import NUMPY_TYPES
from kvgraph.quant.calibrated_plan import calibrate_plan
from kvgraph.quant.calibration_data import CalibrationData
from kvgraph.quant.formats import FORMATS, Floats
from kvgraph.quant.layer_graph import Piece, Product
from kvgraph.quant.layerwise import LayerwiseModel, PieceRunner, Stream
from kvgraph.quant.plan import GraphPlan, QuantizationPlan
from kvgraph.quant.quantized_weight import quantize_weight
from kvgraph.quant.recipe import Override, Recipe
from kvgraph.quant.rescaling import rescale_all
from kvgraph.quant.rewrite import quantize_inputs
from kvgraph.quant.scheme import ModuleScheme, WeightScheme
from kvgraph.quant.token_scales import quantize_tokens
from kvgraph.runtime.parity_metrics import log_softmax

_LOG = logging.getLogger(__name__)
# What divergence is measured on: every variant keeps a stream of so many tokens in memory.
_SEQUENCES, _TOKENS = 4, 64
_FINER = ModuleScheme(WeightScheme("int8"))
# A module and the scheme that it alone is rounded by.
Variant = tuple[str, ModuleScheme]


def choose_schemes(
    model: LayerwiseModel, plan: QuantizationPlan, mean_bits: float, parent: Path
) -> QuantizationPlan:
    """A plan whose recipe has an override for every module that is to have another scheme.

    Args:
        model: The float bundle with its calibration data.
        plan: From `parse_plan`, the same for both graphs.
        mean_bits: Most bits of a weight, on average over the modules that the recipe quantizes.
        parent: Where statistics are kept, see `calibrate_plan`.

    Raises:
        ValueError: The graphs have recipes of their own, the recipe quantizes no matrix, or even its own schemes take
            more bits.
    """
    if plan.prefill is not plan.decode:
        raise ValueError(f"--auto goes with one recipe for both graphs, not with {plan.name}")
    recipe = plan.prefill.recipe
    options = _options(model, recipe)
    if not options:
        raise ValueError(f"recipe {recipe.name!r} quantizes no matrix, so --auto has nothing to choose")
    # Whatever the algorithm, a module that is sensitive to rounding to nearest is sensitive.
    nearest = replace(recipe, algorithm="rtn", kv_cache=None)
    measured = calibrate_plan(model, _plan_of(nearest), parent).prefill
    found = measure_divergences(_excerpt(model), measured, options)
    choices = [_choice(model, module, schemes, found) for module, schemes in options.items()]
    overrides = [
        Override(module, schemes[taken])
        for (module, schemes), taken in zip(options.items(), spend_bits(choices, mean_bits), strict=True)
        if taken != 0
    ]
    _LOG.info("%d of %d modules get another scheme than the recipe's", len(overrides), len(options))
    name = f"{recipe.name}-auto{mean_bits:g}"
    return _plan_of(replace(recipe, name=name, overrides=(*recipe.overrides, *overrides)))


def _plan_of(recipe: Recipe) -> QuantizationPlan:
    graph = GraphPlan(recipe)
    return QuantizationPlan(graph, graph)


def _choice(
    model: LayerwiseModel,
    module: str,
    schemes: list[ModuleScheme | None],
    divergences: Mapping[Variant, float],
) -> Choice:
    """What a module may become, in the order of its schemes."""
    inputs, outputs = model.weights.shape(f"{module}.weight")
    compute_bits = element_bits(model.bundle.dtype)
    options = [
        Option(
            mean_weight_bits(scheme, inputs, compute_bits),
            0.0 if scheme is None else divergences[module, scheme],
        )
        for scheme in schemes
    ]
    return Choice(inputs * outputs, options)


def mean_weight_bits(scheme: ModuleScheme | None, inputs: int, compute_bits: int) -> float:
    """Bits of a weight with its share of scales and zero points; None is a weight in the compute type."""
    if scheme is None:
        return compute_bits
    weight = scheme.weight
    scale_bits = 8 if weight.scale_form == "float8_e4m3fn" else compute_bits
    zero_point_bits = FORMATS[weight.format].bits if FORMATS[weight.format].asymmetric else 0
    return FORMATS[weight.format].bits + (scale_bits + zero_point_bits) / (weight.block_size or inputs)


def measure_divergences(
    model: LayerwiseModel, graph: GraphPlan, options: Mapping[str, list[ModuleScheme | None]]
) -> dict[Variant, float]:
    """Mean KL(float || variant) of the next token's distribution, in nats, for every module rounded alone.

    Args:
        model: The float bundle with one batch of sequences.
        graph: A plan with scales of inputs and factors.
        options: Module -> schemes; None is exact and not measured.
    """
    (batch,) = model.batches
    with tempfile.TemporaryDirectory() as directory:
        start = Stream(Path(directory), 0)
        model.embed(start)
        streams: dict[Variant | None, Floats] = {None: start.read(batch)}
    layers = range(model.graph.num_layers)
    for index in tqdm(layers, desc="measuring modules", unit="layer", disable=None):
        piece = model.graph.layer(index)
        weights = rescale_all(model.layer_weights(piece), graph.rescalings)
        output = hidden_state(index + 1)
        run = PieceRunner(piece)
        following = {
            variant: model.run_batch(run, weights, batch, hidden, [output])[output]
            for variant, hidden in streams.items()
        }
        for variant, rounded_run, rounded in _rounded(model, graph, index, weights, options):
            outputs = model.run_batch(rounded_run, rounded, batch, streams[None], [output])
            following[variant] = outputs[output]
        streams = following
    return _divergences(model, graph, streams, options)


def _divergences(
    model: LayerwiseModel,
    graph: GraphPlan,
    streams: dict[Variant | None, Floats],
    options: Mapping[str, list[ModuleScheme | None]],
) -> dict[Variant, float]:
    """KL of every stream's logits, and of rounded heads."""
    (batch,) = model.batches
    head = model.graph.head(with_logits=True)
    weights = rescale_all(model.layer_weights(head), graph.rescalings)
    run = PieceRunner(head)
    hidden = streams.pop(None)

    def log_probabilities(run: PieceRunner, weights: Mapping[str, Floats], hidden: Floats) -> Floats:
        logits: Floats = model.run_batch(run, weights, batch, hidden, [LOGITS])[LOGITS]
        return logits.reshape(-1, logits.shape[-1])[batch.valid]

    exact = log_probabilities(run, weights, hidden)
    found = {
        variant: _mean_kl(exact, log_probabilities(run, weights, stream))
        for variant, stream in streams.items()
        if variant is not None
    }
    for variant, rounded_run, rounded in _rounded(model, graph, model.graph.num_layers, weights, options):
        found[variant] = _mean_kl(exact, log_probabilities(rounded_run, rounded, hidden))
    return found


def _mean_kl(exact: Floats, other: Floats) -> float:
    """Of logits [R, V], row by row: in float64 a large vocabulary takes space."""
    total = 0.0
    for first, second in zip(exact, other, strict=True):
        p, q = log_softmax(first.astype(np.float64)), log_softmax(second.astype(np.float64))
        total += float((np.exp(p) * (p - q)).sum())
    return max(total / len(exact), 0.0)


def _rounded(
    model: LayerwiseModel,
    graph: GraphPlan,
    index: int,
    weights: Mapping[str, Floats],
    options: Mapping[str, list[ModuleScheme | None]],
) -> Iterator[tuple[Variant, PieceRunner, dict[str, Floats]]]:
    """A piece with each of its modules rounded by each of the module's schemes."""
    with_logits = index == model.graph.num_layers
    scale_dtype = NUMPY_TYPES[model.bundle.dtype]
    fresh = model.graph.head(with_logits=True) if with_logits else model.graph.layer(index)
    for product in fresh.products:
        for scheme in options.get(product.module, ()):
            if scheme is None:
                continue
            piece = model.graph.head(with_logits=True) if with_logits else model.graph.layer(index)
            _round_input(piece, product, scheme, graph)
            quantized = quantize_weight(weights[product.weight], scheme.weight, scale_dtype)
            rounded = {**weights, product.weight: quantized.dequantize()}
            yield (product.module, scheme), PieceRunner(piece), rounded


def _round_input(piece: Piece, product: Product, scheme: ModuleScheme, graph: GraphPlan) -> None:
    """Put Q/DQ before one product, where its scheme rounds the input."""
    if scheme.activation is None:
        return
    whole = ir.Model(piece.graph, ir_version=11)
    if scheme.activation.granularity == "token":
        quantize_tokens(whole, [product.weight], scheme.activation.format)
    else:
        scale = graph.activation_scales[product.module]
        quantize_inputs(whole, {product.weight: scale}, scheme.activation.format)


def _options(model: LayerwiseModel, recipe: Recipe) -> dict[str, list[ModuleScheme | None]]:
    """Schemes of every module that the recipe quantizes: its own, 8-bit weights where it has fewer, none."""
    options: dict[str, list[ModuleScheme | None]] = {}
    for module in model.graph.pieces_by_module():
        scheme = recipe.module_scheme(module)
        if scheme is not None:
            finer = [_FINER] if FORMATS[scheme.weight.format].bits < 8 else []
            options[module] = [scheme, *finer, None]
    return options


def _excerpt(model: LayerwiseModel) -> LayerwiseModel:
    """The model with the few tokens that divergence is measured on."""
    sequences = tuple(ids[:_TOKENS] for ids in model.data.sequences[:_SEQUENCES])
    return LayerwiseModel(model.bundle, model.weights, CalibrationData(sequences, model.data.source))
