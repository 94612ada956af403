"""`kvgraph export CHECKPOINT -o BUNDLE`."""

from __future__ import annotations

import argparse

NAME = "export"
HELP = "turn a checkpoint into a bundle: its ONNX graphs, their weights and a tokenizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "checkpoint", help="Hugging Face directory, GGUF file, hub id, or (with --no-weights) a config.json"
    )
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="directory to write")
    parser.add_argument("--revision", help="branch, tag or commit of a hub checkpoint")
    dtypes = ("float32", "float16", "bfloat16")
    parser.add_argument(
        "--dtype", choices=dtypes, help="weights, activations and cache (default: the checkpoint's)"
    )
    parser.add_argument(
        "--residual-dtype", choices=dtypes, help="type of the residual stream (default: --dtype)"
    )
    parser.add_argument("--capacity", type=int, metavar="N", help="write the cache capacity into the graphs")
    parser.add_argument("--no-weights", action="store_true", help="graphs only; a bare config.json is enough")
    parser.add_argument(
        "--debug-outputs", action="store_true", help="make every layer's residual stream an output"
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")


def run(args: argparse.Namespace) -> int:
    """Export and print one line about the result."""
    from kvgraph.export.exporter import ExportOptions, export_checkpoint
    from kvgraph.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(args.checkpoint, args.revision, weights=not args.no_weights)
    options = ExportOptions(
        dtype=args.dtype,
        residual_dtype=args.residual_dtype,
        capacity=args.capacity,
        weights=not args.no_weights,
        debug_outputs=args.debug_outputs,
    )
    bundle = export_checkpoint(checkpoint, args.output, options, force=args.force)
    size = sum(entry.size for entry in bundle.files.values())
    print(
        f"{bundle.path}: {bundle.model_type}, {bundle.contract.num_layers} layers, {bundle.dtype}, "
        f"{len(bundle.files)} files, {size / 1e6:.1f} MB"
    )
    return 0
