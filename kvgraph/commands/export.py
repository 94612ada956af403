"""`kvgraph export CHECKPOINT -o BUNDLE`."""

from __future__ import annotations

import argparse
import atexit
import gc
from typing import TYPE_CHECKING

from kvgraph.export.collector import without_collecting
from kvgraph.recipe_argument import add_recipe_argument
from kvgraph.sample_text import SAMPLE_TOKENS, check_sample_text

if TYPE_CHECKING:
    from kvgraph.export.bundle import Bundle
    from kvgraph.export.exporter import ExportOptions
    from kvgraph.models.checkpoint import Checkpoint
    from kvgraph.quant.plan import QuantizationPlan

NAME = "export"
HELP = "turn a checkpoint into a bundle: its ONNX graphs, their weights and a tokenizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="Hugging Face directory, GGUF file, hub id, or (with --no-weights) a config.json",
    )
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="directory to write")
    add_recipe_argument(
        parser, "quantize on the way, with no float bundle, by a recipe that needs no data", calibrates=False
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub checkpoint")
    dtypes = ("float32", "float16", "bfloat16")
    parser.add_argument(
        "--dtype", choices=dtypes, help="weights, activations and cache (default: the checkpoint's)"
    )
    parser.add_argument(
        "--residual-dtype", choices=dtypes, help="type of the residual stream (default: --dtype)"
    )
    parser.add_argument(
        "--sample-text",
        metavar="FILE",
        help="refuse a float16 residual stream that overflows on this UTF-8 text, up to its "
        f"{SAMPLE_TOKENS}th token",
    )
    parser.add_argument(
        "--capacity",
        type=int,
        metavar="N",
        help="write N slots of cache a row into the graphs, for a TensorRT that reads the files itself, without "
        "kvgraph build: it needs the number (default: none is written, and caches grow as far as the model allows)",
    )
    parser.add_argument("--no-weights", action="store_true", help="graphs only; a bare config.json is enough")
    parser.add_argument(
        "--debug-outputs", action="store_true", help="make every layer's residual stream an output"
    )
    parser.add_argument(
        "--keep-quantized",
        action=argparse.BooleanOptionalAction,
        help="carry codes and scales of a quantized checkpoint over as they are, or write float weights "
        "(default: keep those of a directory, not those of a GGUF file)",
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")


def run(args: argparse.Namespace) -> int:
    """Export and print one line about the result, behind what a recipe did."""
    # Measured: 1.1 s less at the interpreter's exit, which else looks for cycles among all that torch has made.
    atexit.register(gc.freeze)
    with without_collecting():
        from kvgraph.export.exporter import ExportOptions
        from kvgraph.models.checkpoint import open_checkpoint

    plan = None if args.recipe is None else _plan(args)
    checkpoint = open_checkpoint(args.checkpoint, args.revision, weights=not args.no_weights)
    options = ExportOptions(
        dtype=args.dtype,
        residual_dtype=args.residual_dtype,
        capacity=args.capacity,
        weights=not args.no_weights,
        debug_outputs=args.debug_outputs,
    )
    keeps = _keeps(checkpoint, args.keep_quantized)
    if keeps and plan is not None:
        _refuse_both(args.checkpoint, checkpoint)
    if args.sample_text is not None:
        check_sample_text(args, checkpoint)
    bundle = _write(checkpoint, args, options, plan, keeps)
    if plan is not None:
        from kvgraph.quant.report import format_quantization

        print(format_quantization(bundle))
    if not args.no_weights:
        _print_left_out(checkpoint)
    size = sum(entry.size for entry in bundle.files.values())
    print(
        f"{bundle.path}: {bundle.model_type}, {bundle.contract.num_layers} layers, {_types(bundle)}, "
        f"{len(bundle.files)} files, {size / 1e6:.1f} MB"
    )
    return 0


def _plan(args: argparse.Namespace) -> QuantizationPlan:
    """The recipes, before a checkpoint is fetched for what they cannot be applied to."""
    from kvgraph.quant.checkpoint_quantizer import refuse_plan
    from kvgraph.quant.plan import parse_plan

    if args.no_weights:
        raise ValueError("--recipe rounds weights; leave it or --no-weights out")
    plan = parse_plan(args.recipe)
    refuse_plan(plan)
    return plan


def _write(
    checkpoint: Checkpoint,
    args: argparse.Namespace,
    options: ExportOptions,
    plan: QuantizationPlan | None,
    keeps: bool,
) -> Bundle:
    """The bundle, by one of three ways."""
    if plan is not None:
        from kvgraph.quant.checkpoint_quantizer import quantize_checkpoint

        return quantize_checkpoint(checkpoint, plan, args.output, options, force=args.force)
    if keeps:
        from kvgraph.quant.importer import import_checkpoint

        return import_checkpoint(checkpoint, args.output, options, force=args.force)
    from kvgraph.export.exporter import export_checkpoint

    return export_checkpoint(checkpoint, args.output, options, force=args.force)


def _print_left_out(checkpoint: Checkpoint) -> None:
    """Say which parts of a checkpoint the graphs do not have."""
    from kvgraph.models.family import family

    prefixes = family(checkpoint.config.model_type).left_out
    names = [name for name in checkpoint.weights().names if prefixes and name.startswith(prefixes)]
    if names:
        parts = ", ".join(prefix.rstrip(".") for prefix in prefixes)
        print(f"left out: {len(names)} tensors of {parts}; the graphs read text alone")


def _keeps(checkpoint: Checkpoint, asked: bool | None) -> bool:
    """Whether to keep what is quantized; of a GGUF file, whose blocks serve its own runtime, only if asked to."""
    if asked is None:
        return checkpoint.source.kind != "gguf" and checkpoint.quantized() is not None
    return asked


def _refuse_both(name: str, checkpoint: Checkpoint) -> None:
    """Refuse --recipe where quantized weights are to be kept."""
    if checkpoint.quantized() is None:
        raise ValueError(f"{name}: has no quantized weights to keep; leave --keep-quantized out")
    raise ValueError(
        f"{name}: its quantized weights are kept as they are, and --recipe rounds float ones; leave it out, or add "
        "--no-keep-quantized"
    )


def _types(bundle: Bundle) -> str:
    """Type of the weights, and where they are quantized what brought them."""
    if bundle.recipe_name is None:
        return bundle.dtype
    return f"{bundle.dtype}, weights as {bundle.recipe_name} has them"
