"""A float checkpoint to a quantized bundle, without a float bundle on the way."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kvgraph.export.bundle import BUNDLE_FILE, TARGETS, Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.exporter import ExportedGraphs, ExportOptions, describe_bundle, export_graphs
from kvgraph.export.weight_bytes import one_thread
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.export.writer import write_description, writing_directory
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig
from kvgraph.quant.checkpoint_weights import CheckpointWeights
from kvgraph.quant.plan import QuantizationPlan, needs_calibration
from kvgraph.quant.quantizer import fill_bundle


def quantize_checkpoint(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    output: str | Path,
    options: ExportOptions | None = None,
    *,
    force: bool = False,
) -> Bundle:
    """Trace a checkpoint and write its quantized bundle, read it back and prove its weights.

    The bundle is the one that `export_checkpoint` and `quantize_bundle` would write.

    Args:
        checkpoint: From `open_checkpoint`; of one that is quantized already, the float weights that it stands for.
        plan: From `parse_plan`, with recipes that need neither data nor a rotation.
        output: The bundle's directory.
        options: See `ExportOptions`.
        force: Replace a bundle that is there.

    Raises:
        ValueError: The checkpoint, the plan or an option is wrong.
        FileExistsError: `output` exists and `force` is off.
        RuntimeError: What was written does not give the weights back.
    """
    options = options or ExportOptions()
    refuse_plan(plan)
    name = checkpoint.source.name
    if not options.weights:
        raise ValueError(f"{name}: a recipe rounds weights; leave --no-weights or --recipe out")
    if plan.prefill is not plan.decode and isinstance(checkpoint.config, EncoderDecoderConfig):
        raise ValueError(f"{name}: has an encoder; give one recipe for all of its graphs")
    return write_quantized(checkpoint, output, options, force, lambda graphs, bundle: plan)


def refuse_plan(plan: QuantizationPlan) -> None:
    """Refuse a plan that a float bundle is needed for.

    Raises:
        ValueError: It asks for data or a rotation.
    """
    for graph in GRAPHS:
        recipe = plan.graph(graph).recipe
        if needs_calibration(recipe):
            raise ValueError(
                f"recipe {recipe.name!r} needs data; export without it, and give the bundle to kvgraph quantize with "
                "--calibration FILE"
            )
        if recipe.rotation is not None:
            raise ValueError(
                f"recipe {recipe.name!r} asks for a rotation, which is one of a whole bundle; export without it, and "
                "give the bundle to kvgraph quantize"
            )


def write_quantized(
    checkpoint: Checkpoint,
    output: str | Path,
    options: ExportOptions,
    force: bool,
    choose_plan: Callable[[ExportedGraphs, Bundle], QuantizationPlan],
) -> Bundle:
    """Trace a checkpoint and write a quantized bundle of it.

    Args:
        checkpoint: From `open_checkpoint`.
        output: The bundle's directory.
        options: See `ExportOptions`.
        force: Replace a bundle that is there.
        choose_plan: How it is quantized, by its float graphs and the bundle that they would be in.

    Raises:
        ValueError: The checkpoint or an option is wrong.
        FileExistsError: `output` exists and `force` is off.
        RuntimeError: What was written does not give the weights back.
    """
    with writing_directory(output, BUNDLE_FILE, force, (TARGETS,)) as directory:
        # Hidden, for the bundle lists every other file.
        with tempfile.TemporaryDirectory(prefix=".float-", dir=directory) as temporary:
            stream = checkpoint.weights()
            graphs = export_graphs(Path(temporary), checkpoint, options, stream)
            model = describe_bundle(Path(temporary), checkpoint, graphs, {}, True)
            plan = choose_plan(graphs, model)
            weights = CheckpointWeights(Path(checkpoint.source.name), stream, graphs)
            with one_thread():
                bundle, proof = fill_bundle(directory, model, weights, plan)
        sizes = {"float": graphs.layout.size, "quantized": bundle.files[WEIGHTS_FILE].size}
        quantization = {"source_digest": bundle.source["digest"], "size": sizes, **proof.to_json()}
        write_description(replace(bundle, quantization=quantization))
    return Bundle.open(output)
