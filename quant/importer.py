"""A checkpoint that is quantized already, to a quantized bundle: codes and scales as they stand."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from kvgraph.export.bundle import BUNDLE_FILE, TARGETS, Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.exporter import ExportOptions, describe_bundle, export_graphs
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.export.writer import writing_directory
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.quant.checkpoint_weights import CheckpointWeights
from kvgraph.quant.import_plan import plan_import
from kvgraph.quant.linears import find_linears
from kvgraph.quant.quantizer import fill_bundle, write_description


def import_checkpoint(
    checkpoint: Checkpoint, output: str | Path, options: ExportOptions | None = None, *, force: bool = False
) -> Bundle:
    """Trace a quantized checkpoint and write its bundle, read it back and prove its weights.

    The graphs are those that `export_checkpoint` and `quantize_bundle` would write; no weight is rounded on the way.
    Every dequantized weight must equal the one that the checkpoint stands for, bit for bit.

    Args:
        checkpoint: From `open_checkpoint`.
        output: The bundle's directory.
        options: See `ExportOptions`.
        force: Replace a bundle that is there.

    Raises:
        ValueError: The checkpoint is a float one, damaged, or quantized in a way that is not implemented.
        FileExistsError: `output` exists and `force` is off.
        RuntimeError: What was written does not give the weights back.
    """
    options = options or ExportOptions()
    quantized = checkpoint.quantized()
    if quantized is None:
        raise ValueError(
            f"{checkpoint.source.name}: has no quantized weights to keep; export it as a float bundle"
        )
    if not options.weights:
        raise ValueError(
            f"{checkpoint.source.name}: is quantized, and quantized graphs go with their weights; leave --no-weights "
            "out, or add --no-keep-quantized for float graphs"
        )
    with writing_directory(output, BUNDLE_FILE, force, (TARGETS,)) as directory:
        # Hidden, for the bundle lists every other file.
        with tempfile.TemporaryDirectory(prefix=".float-", dir=directory) as temporary:
            stream = checkpoint.weights()
            graphs = export_graphs(Path(temporary), checkpoint, options, stream)
            if graphs.traced.contract.encoder is not None:
                raise ValueError(
                    f"{checkpoint.source.name}: has an encoder, and quantized checkpoints of such models are not "
                    "implemented; add --no-keep-quantized, and quantize the float bundle"
                )
            model = describe_bundle(Path(temporary), checkpoint, graphs, {}, True)
            linears = find_linears(ir.load(model.graph_path(GRAPHS[0]))).linears
            plan = plan_import(quantized, graphs, linears)
            weights = CheckpointWeights(Path(checkpoint.source.name), stream, graphs)
            bundle, proof = fill_bundle(directory, model, weights, plan)
        sizes = {"float": graphs.layout.size, "quantized": bundle.files[WEIGHTS_FILE].size}
        quantization = {"source_digest": bundle.source["digest"], "size": sizes, **proof.to_json()}
        write_description(replace(bundle, quantization=quantization))
    return Bundle.open(output)
