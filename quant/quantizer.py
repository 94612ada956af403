"""`kvgraph quantize`: a float bundle to a bundle under the same contract, with Q/DQ in standard operators."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from tqdm import tqdm

import kvgraph
from kvgraph.export.bundle import BUNDLE_FILE, TARGETS, Bundle, FileEntry, hash_file
from kvgraph.export.contract import GRAPHS, GraphName, graph_file
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightLayout, WeightsWriter, plan_layout
from kvgraph.export.writer import refuse_nested, write_description, writing_directory
from kvgraph.quant.bundle_weights import BundleWeights, FloatWeights
from kvgraph.quant.evaluation import evaluate_bundle, read_evaluation_text
from kvgraph.quant.kv_cache import delta_contract, quantize_cache
from kvgraph.quant.linears import Linear
from kvgraph.quant.plan import GraphPlan, QuantizationPlan, needs_calibration, round_to_nearest
from kvgraph.quant.proof import WeightProof, prove_weights
from kvgraph.quant.rewrite import dequantize_weight, quantize_inputs, relocate_weights, reorder_inputs
from kvgraph.quant.scheme import ActivationScheme
from kvgraph.quant.tensor_jobs import GraphChoice, TensorJob, choose_schemes, plan_jobs
from kvgraph.quant.tensor_writer import write_tensor
from kvgraph.quant.token_scales import quantize_token_blocks, quantize_tokens

_PACKAGES = ("ml_dtypes", "numpy", "onnx", "onnx-ir")


def quantize_bundle(
    bundle: Bundle,
    plan: QuantizationPlan,
    output: str | Path,
    *,
    evaluation: Path | None = None,
    force: bool = False,
    verify: bool = False,
    source: Bundle | None = None,
) -> Bundle:
    """Write the quantized bundle, read it back and prove its weights; nothing is left behind where that fails.

    Args:
        bundle: A float bundle with weights.
        plan: From `parse_plan`, with what calibration added.
        output: The new bundle's directory.
        evaluation: Text to measure both bundles on.
        force: Replace a bundle that is there.
        verify: Hash the files of `bundle` meanwhile, as `Bundle.open` does before.
        source: What `bundle` was made from by a rotation; default `bundle`.

    Returns:
        The new bundle; its `quantization` says what was quantized, what was left and why, and how exactly.

    Raises:
        ValueError: The bundle is quantized already or has no weights, the plan lacks something, or a file of the
            bundle was changed.
        FileExistsError: `output` exists and `force` is off.
        RuntimeError: What was written does not give the weights back.
    """
    _refuse(bundle, plan, evaluation)
    source = source or bundle
    refuse_output(source, output)
    text = None if evaluation is None else read_evaluation_text(evaluation, bundle)
    with (
        BundleWeights(bundle) as weights,
        writing_directory(output, BUNDLE_FILE, force, (TARGETS,)) as directory,
        bundle.verifying() if verify else nullcontext(),
    ):
        quantized, proof = fill_bundle(directory, bundle, weights, plan)
        sizes = {
            "float": source.files[WEIGHTS_FILE].size,
            "quantized": quantized.files[WEIGHTS_FILE].size,
        }
        quantization = {"source_digest": source.digest(), "size": sizes, **proof.to_json()}
        if text is not None:
            quantization["evaluation"] = evaluate_bundle(bundle, quantized, text).to_json()
        write_description(replace(quantized, quantization=quantization))
    return Bundle.open(output)


def fill_bundle(
    directory: Path, bundle: Bundle, weights: FloatWeights, plan: QuantizationPlan
) -> tuple[Bundle, WeightProof]:
    """Graphs, weights and tokenizer of the quantized bundle; its description, and what it says when read back."""
    graphs = bundle.contract.graphs
    models = {graph: ir.load(bundle.graph_path(graph)) for graph in graphs}
    choices = {graph: choose_schemes(models[graph], plan.graph(graph)) for graph in graphs}
    jobs = plan_jobs(choices, plan, {name: stored.dtype for name, stored in weights.tensors.items()})
    layout = plan_layout(_specs(weights, jobs))
    contract = bundle.contract
    for graph, model in models.items():
        _rewrite(model, graph, choices[graph], jobs, plan, layout)
        # One cache for both graphs: calibration has compared their recipes.
        if (cache := plan.prefill.recipe.kv_cache) is not None:
            quantize_cache(model, bundle.contract, cache, plan.cache_ranges)
            contract = delta_contract(bundle.contract, cache)
        (directory / graph_file(graph)).write_bytes(ir.to_proto(model).SerializeToString())
    with (
        WeightsWriter(directory / WEIGHTS_FILE, layout) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        _write_weights(writer, weights, jobs)
        # It goes to the disk and is hashed while it is read back.
        sha256 = pool.submit(writer.finish)
        _complete(directory, bundle)
        quantized = _describe(directory, replace(bundle, contract=contract), plan, jobs, layout)
        proof = prove_weights(quantized, weights, choices, jobs)
    entry = FileEntry(layout.size, sha256.result())
    return replace(quantized, files={**quantized.files, WEIGHTS_FILE: entry}), proof


def _complete(directory: Path, bundle: Bundle) -> None:
    """Copy what is neither a graph nor weights, and check the graphs that are there."""
    graphs = bundle.contract.graphs
    for name in sorted(bundle.files.keys() - {WEIGHTS_FILE, *map(graph_file, graphs)}):
        shutil.copyfile(bundle.path / name, directory / name)
    for graph in graphs:
        onnx.checker.check_model(str(directory / graph_file(graph)), full_check=True)


def refuse_output(bundle: Bundle, output: str | Path) -> None:
    """Refuse an output that is the bundle to quantize, or lies in it or around it.

    Raises:
        ValueError: It does.
    """
    refuse_nested(output, bundle, "the bundle to quantize")


def _refuse(bundle: Bundle, plan: QuantizationPlan, evaluation: Path | None) -> None:
    bundle.require_whole("kvgraph quantize")
    if bundle.recipe is not None:
        names = dict.fromkeys(recipe["name"] for recipe in bundle.recipe.values())
        raise ValueError(
            f"{bundle.path}: is quantized already ({', '.join(names)}); quantize the float bundle that it was made from"
        )
    if plan.rotated != bundle.is_rotated:
        asked, there = ("a rotation", "none") if plan.rotated else ("none", "one")
        raise ValueError(
            f"recipe {plan.name!r} asks for {asked} and {bundle.path} has {there}; give what rotated_bundle makes of a "
            "bundle where a recipe has rotation, and only there"
        )
    if bundle.contract.encoder is not None:
        _refuse_for_encoders(bundle, plan, evaluation)
    for graph in GRAPHS:
        _refuse_uncalibrated(plan.graph(graph), plan)


def _refuse_for_encoders(bundle: Bundle, plan: QuantizationPlan, evaluation: Path | None) -> None:
    """What is made for decoder-only models alone: data goes through prefill and decode without a source."""
    if plan.prefill is not plan.decode:
        raise ValueError(f"{bundle.path}: has an encoder; give one recipe for all of its graphs")
    if evaluation is not None:
        raise ValueError(
            f"{bundle.path}: has an encoder, and {evaluation} is one text, not sources with their translations; leave "
            "--evaluation out, and compare the bundles with kvgraph compare --against"
        )
    if needs_calibration(plan.prefill.recipe):
        raise ValueError(
            f"recipe {plan.prefill.recipe.name!r} needs data, and {bundle.path} has an encoder, for which calibration "
            "is not implemented; take a weight-only recipe that rounds to nearest, such as int8-wo"
        )


def _refuse_uncalibrated(graph: GraphPlan, plan: QuantizationPlan) -> None:
    """What a recipe asks for and only data can give must be there: left out, it would be missed by nobody."""
    recipe = graph.recipe
    missing = {
        f"algorithm {recipe.algorithm}": recipe.algorithm != "rtn"
        and graph.weight_quantizer is round_to_nearest,
        # A search may find that no factors are better; scales there are then, all the same.
        "smooth_quant": recipe.smooth_quant is not None and not (graph.rescalings or graph.activation_scales),
        "kv_cache": recipe.kv_cache is not None and not plan.cache_ranges,
    }
    if what := [name for name, lacks in missing.items() if lacks]:
        raise ValueError(f"recipe {recipe.name!r}: {what[0]} needs data; give --calibration FILE")


def _specs(weights: FloatWeights, jobs: Iterable[TensorJob]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of every tensor that the jobs write."""
    specs: dict[str, tuple[str, tuple[int, ...]]] = {}
    for job in jobs:
        if job.stored is None:
            source = weights.tensors[job.source]
            specs[job.name] = (source.dtype, source.shape)
        else:
            for spec in job.stored.tensors:
                specs[spec.name] = (spec.dtype, tuple(int(dim) for dim in spec.shape))
    return specs


def _rewrite(
    model: ir.Model,
    graph: GraphName,
    choice: GraphChoice,
    jobs: Iterable[TensorJob],
    plan: QuantizationPlan,
    layout: WeightLayout,
) -> None:
    """Turn a float graph into its quantized form over the new weights file."""
    mine = [job for job in jobs if graph in job.graphs]
    for job in mine:
        if job.stored is not None:
            dequantize_weight(model, job.stored, layout)
    relocate_weights(model, layout, {job.source: job.name for job in mine if job.stored is None})
    codes = {job.stored.linear: job.stored.codes.name for job in mine if job.stored is not None}
    if (ready := plan.graph(graph).ready_weights) is not None:
        orders = {name: ready.input_order(linear.module) for linear, name in codes.items()}
        reorder_inputs(model, {name: order for name, order in orders.items() if order is not None})
    _round_inputs(model, choice, codes, plan.graph(graph).activation_scales)


def _round_inputs(
    model: ir.Model, choice: GraphChoice, codes: Mapping[Linear, str], scales: Mapping[str, float]
) -> None:
    """Round the inputs of matrix products; `codes` names their weights, `scales` has those of whole inputs."""
    groups: dict[ActivationScheme, list[Linear]] = {}
    for linear, module in choice.schemes.items():
        if module.activation is not None:
            groups.setdefault(module.activation, []).append(linear)
    for scheme, linears in groups.items():
        names = [codes[linear] for linear in linears]
        if scheme.granularity == "tensor":
            static = {codes[linear]: scales[linear.module] for linear in linears}
            quantize_inputs(model, static, scheme.format, scheme.scale_form == "float32")
        elif scheme.block_size is None:
            quantize_tokens(model, names, scheme.format)
        else:
            quantize_token_blocks(model, names, scheme.format, scheme.block_size)


def _write_weights(writer: WeightsWriter, weights: FloatWeights, jobs: Iterable[TensorJob]) -> None:
    total = sum(weights.tensors[job.source].size for job in jobs)
    with tqdm(total=total, desc="quantizing", unit="B", unit_scale=True, disable=None) as bar:
        for job in jobs:
            write_tensor(writer, weights, job)
            bar.update(weights.tensors[job.source].size)


def _describe(
    directory: Path,
    bundle: Bundle,
    plan: QuantizationPlan,
    jobs: Iterable[TensorJob],
    layout: WeightLayout,
) -> Bundle:
    """bundle.json of a filled directory, but for the hash of the weights."""
    files = {
        file.name: FileEntry(file.stat().st_size, "" if file.name == WEIGHTS_FILE else hash_file(file))
        for file in sorted(directory.iterdir())
        if not file.name.startswith(".")
    }
    return replace(
        bundle,
        path=directory,
        tool_version=kvgraph.__version__,
        recipe={graph: plan.graph(graph).recipe.to_json() for graph in bundle.contract.graphs},
        weights=_describe_tensors(bundle, jobs, layout),
        files=files,
        versions={**bundle.versions, **{package: version(package) for package in _PACKAGES}},
    )


def _describe_tensors(
    bundle: Bundle, jobs: Iterable[TensorJob], layout: WeightLayout
) -> dict[str, dict[str, Any]]:
    """Where every tensor comes from; a scale or zero point says in "role" that it is no weight by itself."""
    described: dict[str, dict[str, Any]] = {}
    for job in jobs:
        roles: dict[str, str | None] = {job.name: None}
        if job.stored is not None:
            roles |= {
                spec.name: spec.name.removeprefix(f"{job.name}_")
                for spec in job.stored.tensors
                if spec.name != job.name
            }
        for name, role in roles.items():
            stored = layout.tensors[name]
            entry = {**bundle.weights[job.source], "dtype": stored.dtype, "shape": list(stored.shape)}
            described[name] = entry if role is None else {**entry, "role": role}
    return described
