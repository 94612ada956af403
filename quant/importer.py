"""A checkpoint that is quantized already, to a quantized bundle: codes and scales as they stand."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.exporter import ExportedGraphs, ExportOptions
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig
from kvgraph.quant.checkpoint_quantizer import write_quantized
from kvgraph.quant.import_plan import plan_import
from kvgraph.quant.linears import find_linears
from kvgraph.quant.plan import QuantizationPlan


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
    name, quantized = checkpoint.source.name, checkpoint.quantized()
    if quantized is None:
        raise ValueError(f"{name}: has no quantized weights to keep; export it as a float bundle")
    if not options.weights:
        raise ValueError(
            f"{name}: is quantized, and quantized graphs go with their weights; leave --no-weights "
            "out, or add --no-keep-quantized for float graphs"
        )
    if isinstance(checkpoint.config, EncoderDecoderConfig):
        raise ValueError(
            f"{name}: has an encoder, and quantized checkpoints of such models are not implemented; add "
            "--no-keep-quantized, and quantize the float bundle"
        )

    def choose_plan(graphs: ExportedGraphs, model: Bundle) -> QuantizationPlan:
        return plan_import(quantized, graphs, find_linears(ir.load(model.graph_path(GRAPHS[0]))).linears)

    return write_quantized(checkpoint, output, options, force, choose_plan)
