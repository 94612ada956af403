"""`kvgraph quantize BUNDLE -o BUNDLE --recipe RECIPE`."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "quantize"
HELP = "quantize a bundle: weights, activations, in standard operators, measured against the float bundle"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("bundle", metavar="BUNDLE", help="float bundle from kvgraph export")
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="directory to write")
    parser.add_argument(
        "--recipe",
        required=True,
        metavar="NAME|FILE|prefill=NAME,decode=NAME",
        help="what is quantized and how: a recipe's name, a .toml or .json file, or one for each graph",
    )
    parser.add_argument(
        "--evaluation", metavar="FILE", help="measure perplexity, KL and top-1 agreement on this UTF-8 text"
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")
    parser.add_argument("--explain", action="store_true", help="show every module: recipe, scales, error")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of errors and scales as PNG")


def run(args: argparse.Namespace) -> int:
    """Quantize, print what was done and what it cost, and one line about the result."""
    from kvgraph.export.bundle import Bundle
    from kvgraph.quant.plan import parse_plan
    from kvgraph.quant.quantizer import quantize_bundle
    from kvgraph.quant.report import format_quantization

    plan = parse_plan(args.recipe)
    evaluation = None if args.evaluation is None else Path(args.evaluation)
    bundle = quantize_bundle(
        Bundle.open(args.bundle), plan, args.output, evaluation=evaluation, force=args.force
    )
    print(format_quantization(bundle, args.explain))
    if args.plot is not None:
        from kvgraph.quant.plot import plot_quantization

        plot_quantization(bundle, args.plot)
    size = sum(entry.size for entry in bundle.files.values())
    print(f"{bundle.path}: {plan.name}, {len(bundle.files)} files, {size / 1e6:.1f} MB")
    return 0
