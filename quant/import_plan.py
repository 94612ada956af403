"""The plan of a checkpoint that is quantized already: its own codes and scales, in the terms of a recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from kvgraph.export.contract import Contract
from kvgraph.export.exporter import ExportedGraphs
from kvgraph.models.quantized.coded import (
    ActivationCode,
    CacheCode,
    CodedWeight,
    CodeScheme,
    QuantizedCheckpoint,
)
from kvgraph.quant.bundle_weights import NUMPY_TYPES
from kvgraph.quant.checkpoint_weights import CheckpointCodes
from kvgraph.quant.linears import Linear
from kvgraph.quant.plan import CacheRange, GraphPlan, QuantizationPlan
from kvgraph.quant.recipe import Override, Recipe
from kvgraph.quant.scheme import ActivationScheme, CacheScheme, ModuleScheme, WeightScheme

ScaleForm = Literal["float", "float32"]


def plan_import(
    quantized: QuantizedCheckpoint, graphs: ExportedGraphs, linears: Iterable[Linear]
) -> QuantizationPlan:
    """One plan for both graphs.

    Args:
        quantized: The checkpoint.
        graphs: Float graphs of its model.
        linears: The weights in them that can be quantized.

    Raises:
        ValueError: The checkpoint holds a weight in a form that graphs do not have.
    """
    sources = graphs.traced.weights.sources
    schemes: dict[str, ModuleScheme] = {}
    left: list[str] = []
    input_scales: dict[str, float] = {}
    for linear in linears:
        names = sources[linear.tensor].names
        coded = [quantized.coded[name] for name in names if name in quantized.coded]
        if not coded:
            left.append(linear.module)
            continue
        _check(linear, names, coded, graphs)
        activation = coded[0].scheme.activation
        schemes[linear.module] = _module_scheme(coded[0].scheme, graphs.dtype)
        if activation is not None and activation.scale is not None:
            input_scales[linear.module] = activation.scale
    weights = {module: scheme.weight for module, scheme in schemes.items()}
    plan = GraphPlan(
        _recipe(quantized, schemes, left, graphs.dtype),
        activation_scales=input_scales,
        ready_weights=CheckpointCodes(quantized.coded, sources, weights, graphs.dtype),
    )
    ranges = {} if quantized.cache is None else _cache_ranges(quantized.cache, graphs.traced.contract)
    return QuantizationPlan(plan, plan, ranges)


def _check(linear: Linear, names: tuple[str, ...], coded: list[CodedWeight], graphs: ExportedGraphs) -> None:
    """Refuse what codes of one matrix in the graph cannot be made from."""
    source, first = graphs.traced.weights.sources[linear.tensor], coded[0]
    where = f"{first.spec.file}: {first.spec.name}"
    if len(coded) < len(names) or any(_weight(weight) != _weight(first) for weight in coded):
        raise ValueError(f"{where}: experts of one layer are quantized in different ways, expected one")
    outputs_axis = 1 if first.turned else 0
    if (source.ranges and source.axis != outputs_axis) or source.transpose == (
        first.turned or linear.kind == "table"
    ):
        raise ValueError(
            f"{where}: lies the other way round than its codes do, of which there is no quantized form"
        )
    if linear.kind == "matmul":
        return
    if any(weight.order is not None for weight in coded):
        raise ValueError(f"{where}: inputs of a {linear.kind} in an order of their own are not implemented")
    activation = first.scheme.activation
    if activation is not None and (linear.kind == "table" or activation.scale is not None):
        raise ValueError(f"{where}: a fixed scale for the inputs of a {linear.kind} is not implemented")


def _weight(weight: CodedWeight) -> tuple[object, ...]:
    scheme = weight.scheme
    return scheme.format, scheme.block_size, scheme.scale_dtype, scheme.activation


def _module_scheme(scheme: CodeScheme, dtype: str) -> ModuleScheme:
    stored = str(scheme.scale_dtype).removeprefix("torch.")
    exact = dtype in ("float32", stored)
    activation = scheme.activation
    exact_input = activation is None or activation.scale is None or is_exact(activation.scale, dtype)
    if scheme.format == "float8_e4m3fn":
        # TensorRT multiplies 8-bit floats whose scales are of one type.
        exact = exact_input = exact and exact_input
    weight = WeightScheme(scheme.format, scheme.block_size, _scale_form(exact))
    return ModuleScheme(
        weight, None if activation is None else _activation(activation, _scale_form(exact_input))
    )


def _activation(code: ActivationCode, form: ScaleForm) -> ActivationScheme:
    if code.scale is None:
        return ActivationScheme(code.format, "token", block_size=code.block_size)
    return ActivationScheme(code.format, "tensor", scale_form=form)


def _scale_form(exact: bool) -> ScaleForm:
    return "float" if exact else "float32"


def is_exact(scale: float, dtype: str) -> bool:
    """Whether a type holds a scale as it is."""
    return float(np.array(scale, np.float32).astype(NUMPY_TYPES[dtype]).astype(np.float32)) == scale


def _recipe(
    quantized: QuantizedCheckpoint, schemes: Mapping[str, ModuleScheme], left: Iterable[str], dtype: str
) -> Recipe:
    """What most modules have, and an override for each of the others."""
    common = max(Counter(schemes.values()).items(), key=lambda pair: pair[1])[0] if schemes else None
    others: dict[str, ModuleScheme | None] = dict.fromkeys(left)
    for module, scheme in schemes.items():
        if scheme != common or module in ("lm_head", "model.embed_tokens"):
            others[module] = scheme
    origin: dict[str, Any] = {"method": quantized.method, "settings": dict(quantized.settings)}
    return Recipe(
        quantized.method,
        common,
        overrides=tuple(Override(module, scheme) for module, scheme in sorted(others.items())),
        kv_cache=None if quantized.cache is None else _cache_scheme(quantized.cache, dtype),
        origin=origin,
    )


def _cache_scheme(cache: CacheCode, dtype: str) -> CacheScheme:
    exact = all(is_exact(scale, dtype) for scale in cache.scales.values())
    return CacheScheme(cache.format, "tensor", scale_form=_scale_form(exact))


def _cache_ranges(cache: CacheCode, contract: Contract) -> dict[str, CacheRange]:
    """Scales of the state tensors, which must all have one.

    Raises:
        ValueError: One is missing, or belongs to no layer.
    """
    owners = {(tensor.layer, str(tensor.role)): tensor for tensor in contract.state}
    if missing := [tensor.name for owner, tensor in owners.items() if owner not in cache.scales]:
        raise ValueError(f"the settings ask for a quantized cache, but there is no scale for {missing[0]}")
    if extra := [owner for owner in cache.scales if owner not in owners]:
        raise ValueError(
            f"there is a scale for the {extra[0][1]}s of layer {extra[0][0]}, which the model does not have"
        )
    ranges = {}
    for owner, tensor in owners.items():
        _, heads, _, head_dim = tensor.shape
        offset = np.zeros((int(heads), int(head_dim)), np.float32)
        ranges[tensor.name] = CacheRange(np.array(cache.scales[owner], np.float32), offset)
    return ranges
