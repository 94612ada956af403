"""What is done to each graph of a bundle: a recipe, and what calibration found out for it.

A recipe says which format every module gets. An algorithm that looks at data (GPTQ, AWQ, SmoothQuant, static ranges)
adds to a `GraphPlan` what the recipe cannot know, in three forms:

| form | of use to |
|---|---|
| `activation_scales` | inputs with one calibrated scale |
| `rescalings` | SmoothQuant and AWQ: factors that one weight gains and another loses, the function unchanged |
| `weight_quantizer` | GPTQ: which code every weight gets |

A checkpoint that is quantized already brings `ready_weights` instead: codes and scales as they stand, and the order in
which it stores a matrix's inputs.

Everything else (which tensors there are, where they go, how the graphs are rewritten) is the pipeline's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import GRAPHS, GraphName
from kvgraph.quant.formats import Floats
from kvgraph.quant.linears import Linear
from kvgraph.quant.quantized_weight import QuantizedWeight, quantize_weight
from kvgraph.quant.recipe import Recipe, load_recipe
from kvgraph.quant.scheme import CacheScheme, WeightScheme


@dataclass(frozen=True, slots=True)
class WeightPart:
    """All inputs of some outputs of a matrix product's weight: what is rounded at a time.

    Attributes:
        module: Whose weight, "model.layers.0.mlp.up_proj".
        first_output: Which output of the module the part begins with; 0 where the part is the whole.
        weight: [I, n] float32, already rescaled. Of an embedding table [V, E] its transpose, inputs being E.
        scheme: How to round it.
        scale_dtype: Type that the graph stores scales in.
        largest: Largest magnitude of the whole weight, where the scheme has one scale over all (NVFP4); else None.
    """

    module: str
    first_output: int
    weight: Floats
    scheme: WeightScheme
    scale_dtype: np.dtype[np.generic]
    largest: float | None = None


# Modules come in the order in which the graph computes them, so an algorithm may do a layer's work when the layer's
# first module asks for it. Parts of one module come one after another.
WeightQuantizer = Callable[[WeightPart], QuantizedWeight]


def round_to_nearest(part: WeightPart) -> QuantizedWeight:
    """The default `WeightQuantizer`: every weight to the nearest code."""
    return quantize_weight(part.weight, part.scheme, part.scale_dtype, part.largest)


class ReadyWeights(Protocol):
    """Weights that are quantized already."""

    def read(self, linear: Linear, expert: int, start: int, stop: int) -> QuantizedWeight:
        """Outputs `start` to `stop` of a weight, or of one expert's.

        Raises:
            ValueError: They are damaged.
        """

    def input_order(self, module: str) -> NDArray[np.int32] | None:
        """Which input of a module each row of its codes is for, [I]; None: the same."""


@dataclass(frozen=True, slots=True)
class Rescaling:
    """Factors of one stored tensor.

    Attributes:
        inputs: [I], for each input of a matrix [I, O]: multiplies its rows.
        outputs: [O], for each output of a matrix, or for each element of a norm's weight or a bias.
    """

    inputs: Floats | None = None
    outputs: Floats | None = None


@dataclass(frozen=True, slots=True)
class CacheRange:
    """How the codes of one state tensor stand for values: value = code * scale + offset.

    Attributes:
        scale: [], [K] or [K, D], by the scheme's granularity.
        offset: [K, D].
        unrotated: Whether values are keys before their rotary embedding.
    """

    scale: Floats
    offset: Floats
    unrotated: bool = False


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How one graph is quantized.

    Attributes:
        recipe: Which module gets which scheme.
        weight_quantizer: Chooses the codes.
        activation_scales: Module -> scale of its input; for every module whose recipe has one scale for a tensor.
        rescalings: Name of a stored tensor ("model.layers.0.input_layernorm.weight") -> its factors, applied in
            float32 before the tensor is rounded or, where it stays float, stored.
        ready_weights: Codes and scales in the place of `weight_quantizer`; None where weights are float.
    """

    recipe: Recipe
    weight_quantizer: WeightQuantizer = round_to_nearest
    activation_scales: Mapping[str, float] = field(default_factory=dict)
    rescalings: Mapping[str, Rescaling] = field(default_factory=dict)
    ready_weights: ReadyWeights | None = None


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """How both graphs are quantized; where both are the same object, the graphs share every weight.

    Attributes:
        prefill: How prefill.onnx is.
        decode: How decode.onnx is.
        cache_ranges: State tensor ("past_key_values.0.key") -> its offset and scale; empty where the cache stays
            float.
    """

    prefill: GraphPlan
    decode: GraphPlan
    cache_ranges: Mapping[str, CacheRange] = field(default_factory=dict)

    def graph(self, name: GraphName) -> GraphPlan:
        """The plan of one graph; an encoder's is that of prefill, which it resembles."""
        return self.decode if name == "decode" else self.prefill

    @property
    def rotated(self) -> bool:
        """Whether the weights are to be rotated first.

        Raises:
            ValueError: Only one of the recipes says so.
        """
        rotations = {self.graph(graph).recipe.rotation for graph in GRAPHS}
        if len(rotations) > 1:
            raise ValueError(f"recipes {self.name}: rotation is in one alone; both graphs read one cache")
        return rotations != {None}

    @property
    def name(self) -> str:
        """As the command line spells it: "int8-wo", or "prefill=int8-sq,decode=int4-wo"."""
        if self.prefill is self.decode:
            return self.prefill.recipe.name
        return ",".join(f"{graph}={self.graph(graph).recipe.name}" for graph in GRAPHS)


def parse_plan(text: str) -> QuantizationPlan:
    """The plan of `--recipe`: a recipe's name or file for both graphs, or "prefill=NAME,decode=NAME".

    Raises:
        ValueError: The text is malformed, or a recipe is not known.
        FileNotFoundError: A recipe's file is not there.
    """
    if "=" not in text:
        plan = GraphPlan(load_recipe(text))
        return QuantizationPlan(plan, plan)
    pairs = [part.partition("=") for part in text.split(",")]
    names = {graph.strip(): name.strip() for graph, _, name in pairs}
    if len(pairs) != len(names) or set(names) != set(GRAPHS) or not all(names.values()):
        raise ValueError(f"recipe {text!r}: expected a name or a file, or prefill=NAME,decode=NAME")
    if names["prefill"] == names["decode"]:
        return parse_plan(names["prefill"])
    return QuantizationPlan(GraphPlan(load_recipe(names["prefill"])), GraphPlan(load_recipe(names["decode"])))


def float_plan() -> QuantizationPlan:
    """A plan that quantizes nothing, for what is added to it."""
    plan = GraphPlan(Recipe("float"))
    return QuantizationPlan(plan, plan)


def with_cache(plan: QuantizationPlan, form: Literal["int8", "fp8"]) -> QuantizationPlan:
    """A plan whose recipes quantize the cache: INT8 by channel, FP8, whose steps are relative anyway, as a whole.

    Keys are kept without what their rotary embedding does to them: what is left of them without their mean, which then
    is the same at all positions, is small, and so are its steps.
    """
    scheme = (
        CacheScheme("float8_e4m3fn", "tensor", "unrotated")
        if form == "fp8"
        else CacheScheme(form, "channel", "unrotated")
    )

    def add(graph: GraphPlan) -> GraphPlan:
        return replace(graph, recipe=replace(graph.recipe, kv_cache=scheme))

    prefill = add(plan.prefill)
    return replace(plan, prefill=prefill, decode=prefill if plan.prefill is plan.decode else add(plan.decode))


def needs_calibration(recipe: Recipe) -> bool:
    """Whether a recipe cannot be applied without data."""
    return recipe.algorithm == "gptq" or needs_statistics(recipe)


def needs_statistics(recipe: Recipe) -> bool:
    """Whether a recipe needs ranges of activations."""
    schemes = [recipe.linear, *(override.scheme for override in recipe.overrides)]
    static = any(
        scheme is not None and scheme.activation is not None and scheme.activation.granularity == "tensor"
        for scheme in schemes
    )
    return (
        static or recipe.smooth_quant is not None or recipe.algorithm == "awq" or recipe.kv_cache is not None
    )
