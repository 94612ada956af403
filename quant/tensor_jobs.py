"""What becomes of every tensor of a bundle: copied, rescaled or quantized; once for both graphs or once for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from kvgraph.export.contract import GRAPHS, GraphName
from kvgraph.quant.formats import Floats
from kvgraph.quant.linears import Linear, find_linears
from kvgraph.quant.plan import GraphPlan, QuantizationPlan, Rescaling
from kvgraph.quant.scheme import ModuleScheme
from kvgraph.quant.storage import StoredWeight, plan_storage, splits_bytes


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """What a recipe makes of one graph.

    Attributes:
        tensors: Every tensor of the weights file that the graph reads.
        schemes: Linear -> how it is quantized, in the order of the graph.
        left: Module, or tensor that is no linear's -> why it stays float.
    """

    tensors: tuple[str, ...]
    schemes: Mapping[Linear, ModuleScheme]
    left: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TensorJob:
    """A tensor to write.

    Attributes:
        source: The tensor of the float bundle.
        name: Its name in the new one.
        graphs: Which graphs read it.
        plan: The plan of those graphs.
        stored: How it is stored quantized; None where it stays float.
    """

    source: str
    name: str
    graphs: tuple[GraphName, ...]
    plan: GraphPlan
    stored: StoredWeight | None

    @property
    def rescaling(self) -> Rescaling | None:
        """Factors that it is multiplied by first."""
        return self.plan.rescalings.get(self.source)


def choose_schemes(model: ir.Model, plan: GraphPlan) -> GraphChoice:
    """Ask a recipe about every weight of a graph.

    Raises:
        ValueError: The recipe quantizes nothing, or an input needs a scale that the plan does not have.
    """
    found, recipe = find_linears(model), plan.recipe
    schemes: dict[Linear, ModuleScheme] = {}
    left = dict(found.others)
    for linear in found.linears:
        scheme = recipe.module_scheme(linear.module)
        if scheme is None:
            left[linear.module] = "the recipe keeps it"
        elif splits_bytes(plan_storage(linear, scheme.weight, "", "float32")):
            left[linear.module] = "an expert's 4-bit weights or zero points would begin within a byte"
        else:
            # Experts' inputs are rounded where a checkpoint was made for that alone.
            whole = linear.kind == "matmul" or plan.ready_weights is not None
            schemes[linear] = scheme if whole else ModuleScheme(scheme.weight)
    if not schemes and recipe.kv_cache is None:
        raise ValueError(f"recipe {recipe.name!r} quantizes no weight of {model.graph.name}")
    _check_scales(schemes, plan)
    external = (
        name
        for name, value in model.graph.initializers.items()
        if isinstance(value.const_value, ir.ExternalTensor)
    )
    return GraphChoice(tuple(external), schemes, left)


def plan_jobs(
    choices: Mapping[GraphName, GraphChoice], plan: QuantizationPlan, dtypes: Mapping[str, str]
) -> list[TensorJob]:
    """Every tensor to write, quantized ones first: all of the first graph's in its order, then what others add.

    A tensor is stored once where its graphs treat it alike, or only one reads it.

    Args:
        choices: What the recipes make of the graphs.
        plan: The recipes.
        dtypes: Of every tensor of the float bundle.
    """
    jobs = []
    for graph in choices:
        choice = choices[graph]
        by_tensor = {linear.tensor: linear for linear in choice.schemes}
        others = [name for name in choice.tensors if name not in by_tensor]
        for tensor in (*by_tensor, *others):
            readers = tuple(name for name in choices if tensor in choices[name].tensors)
            shared = len(readers) == 1 or _alike(tensor, choices, plan)
            if shared and graph != readers[0]:
                continue
            prefix = "" if shared else f"{graph}."
            linear = by_tensor.get(tensor)
            stored = None
            if linear is not None:
                stored = plan_storage(linear, choice.schemes[linear].weight, prefix, dtypes[tensor])
            graphs = readers if shared else (graph,)
            jobs.append(TensorJob(tensor, f"{prefix}{tensor}", graphs, plan.graph(graph), stored))
    return sorted(jobs, key=lambda job: job.stored is None)


def _check_scales(schemes: Mapping[Linear, ModuleScheme], plan: GraphPlan) -> None:
    """Every input with one scale for the tensor has a usable one."""
    for linear, scheme in schemes.items():
        if scheme.activation is None or scheme.activation.granularity != "tensor":
            continue
        scale = plan.activation_scales.get(linear.module)
        if scale is None:
            raise ValueError(
                f"recipe {plan.recipe.name!r}: {linear.module} has no scale for its input; give --calibration FILE"
            )
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(
                f"{linear.module}: the scale of its input is {scale}, expected a positive number"
            )


def _alike(tensor: str, choices: Mapping[GraphName, GraphChoice], plan: QuantizationPlan) -> bool:
    """Whether both graphs store a tensor in the same way."""
    if plan.prefill is plan.decode:
        return True
    weights = [_weight_scheme(tensor, choices[graph].schemes.items()) for graph in GRAPHS]
    quantizers = {plan.graph(graph).weight_quantizer for graph in GRAPHS}
    if weights[0] != weights[1] or (weights[0] is not None and len(quantizers) > 1):
        return False
    first, second = (plan.graph(graph).rescalings.get(tensor) for graph in GRAPHS)
    return first is second or (first is not None and second is not None and _equal(first, second))


def _weight_scheme(tensor: str, schemes: Iterable[tuple[Linear, ModuleScheme]]) -> object:
    return next((scheme.weight for linear, scheme in schemes if linear.tensor == tensor), None)


def _equal(first: Rescaling, second: Rescaling) -> bool:
    return _same(first.inputs, second.inputs) and _same(first.outputs, second.outputs)


def _same(first: Floats | None, second: Floats | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
