"""`kvgraph quantize BUNDLE -o BUNDLE --recipe RECIPE`."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraph.files import check_folder
from kvgraph.recipe_argument import add_recipe_argument

if TYPE_CHECKING:
    from kvgraph.export.bundle import Bundle
    from kvgraph.quant.plan import QuantizationPlan

NAME = "quantize"
HELP = "quantize a bundle: weights, activations and cache, in standard operators, measured against the float bundle"

# Beside the output: what calibration learns of a bundle and its data serves every recipe.
_STATISTICS = ".kvgraph-calibration"
# Flags that mean something with --calibration alone -> the field of CalibrationOptions.
_CALIBRATION_FLAGS = {"--samples": "samples", "--sequence-length": "sequence_length", "--seed": "seed"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument("bundle", metavar="BUNDLE", help="float bundle from kvgraph export")
    parser.add_argument("-o", "--output", required=True, metavar="BUNDLE", help="directory to write")
    add_recipe_argument(parser, "the recipe: what is quantized and how", calibrates=True)
    parser.add_argument(
        "--kv-cache",
        choices=("int8", "fp8"),
        help="quantize the cache, on top of a recipe or alone; needs --calibration",
    )
    parser.add_argument(
        "--evaluation", metavar="FILE", help="measure perplexity, KL and top-1 agreement on this UTF-8 text"
    )
    parser.add_argument("--force", action="store_true", help="replace a bundle that is there")
    parser.add_argument("--explain", action="store_true", help="show every module: recipe, scales, error")
    parser.add_argument("--plot", metavar="FILE", help="write a picture of errors and scales as PNG")
    calibration = parser.add_argument_group("calibration, for recipes that need data")
    calibration.add_argument(
        "--calibration", metavar="FILE", help="UTF-8 text, .jsonl of texts or chats, or .npy of token ids"
    )
    calibration.add_argument("--samples", type=int, metavar="N", help="most sequences (128)")
    calibration.add_argument(
        "--sequence-length",
        type=int,
        metavar="N",
        help="most tokens of a sequence (the model's, at most 512)",
    )
    calibration.add_argument("--seed", type=int, metavar="N", help="which sequences, of more than that (0)")
    calibration.add_argument(
        "--auto",
        type=float,
        metavar="BITS",
        help="measure what every module's rounding does to the model, and give the sensitive ones 8 bits or leave "
        "them float, as long as a weight of the recipe's modules takes at most BITS on average",
    )


def run(args: argparse.Namespace) -> int:
    """Quantize, print what was done and what it cost, and one line about the result."""
    from kvgraph.export.bundle import Bundle
    from kvgraph.quant.quantizer import quantize_bundle, refuse_output
    from kvgraph.quant.report import format_quantization
    from kvgraph.quant.rotated_bundle import rotated_bundle

    plan = _plan(args)
    source = Bundle.open(args.bundle)
    source.require_whole("kvgraph quantize")
    refuse_output(source, args.output)
    # Before calibration, which may take an hour; without, while the weights are rounded.
    at_once = args.calibration is not None or plan.rotated
    source = Bundle.open(args.bundle, verify=at_once)
    evaluation = None if args.evaluation is None else Path(args.evaluation)
    if args.plot is not None:
        check_folder(args.plot)
    with ExitStack() as stack:
        bundle = source
        if plan.rotated:
            bundle = stack.enter_context(rotated_bundle(source, Path(args.output).resolve().parent))
        if args.calibration is not None:
            plan = _calibrated(args, bundle, plan, stack)
        options: dict[str, Any] = {"evaluation": evaluation, "force": args.force, "source": source}
        bundle = quantize_bundle(bundle, plan, args.output, verify=not at_once, **options)
    print(format_quantization(bundle, args.explain))
    if args.plot is not None:
        from kvgraph.quant.plot import plot_quantization

        plot_quantization(bundle, args.plot)
    size = sum(entry.size for entry in bundle.files.values())
    print(f"{bundle.path}: {plan.name}, {len(bundle.files)} files, {size / 1e6:.1f} MB")
    return 0


def _plan(args: argparse.Namespace) -> QuantizationPlan:
    """The recipes, where the flags go with them."""
    from kvgraph.quant.plan import float_plan, parse_plan, with_cache

    if args.recipe is None and args.kv_cache is None:
        raise ValueError("nothing to quantize; give --recipe NAME, --kv-cache int8 or fp8, or both")
    plan = float_plan() if args.recipe is None else parse_plan(args.recipe)
    if args.kv_cache is not None:
        plan = with_cache(plan, args.kv_cache)
    if args.calibration is None:
        flags = {**_CALIBRATION_FLAGS, "--auto": "auto"}
        if unused := [flag for flag, name in flags.items() if getattr(args, name) is not None]:
            raise ValueError(f"{unused[0]} is for --calibration FILE; give one, or leave it out")
    return plan


def _calibrated(
    args: argparse.Namespace, bundle: Bundle, plan: QuantizationPlan, stack: ExitStack
) -> QuantizationPlan:
    """The recipes with everything that data tells; what that reads is open until `stack` closes."""
    from kvgraph.quant.bundle_weights import BundleWeights
    from kvgraph.quant.calibrated_plan import calibrate_plan
    from kvgraph.quant.calibration_data import CalibrationOptions, read_calibration
    from kvgraph.quant.layerwise import LayerwiseModel

    limit = bundle.contract.capacity or bundle.contract.max_positions
    options = {"sequence_length": min(CalibrationOptions().sequence_length, limit)}
    given = {name: getattr(args, name) for name in _CALIBRATION_FLAGS.values()}
    options |= {name: value for name, value in given.items() if value is not None}
    data = read_calibration(args.calibration, bundle, CalibrationOptions(**options))
    weights = stack.enter_context(BundleWeights(bundle))
    model = LayerwiseModel(bundle, weights, data)
    parent = Path(args.output).resolve().parent / _STATISTICS
    if args.auto is not None:
        from kvgraph.quant.auto import choose_schemes

        plan = choose_schemes(model, plan, args.auto, parent)
    return calibrate_plan(model, plan, parent)
