"""`kvgraph build BUNDLE --target NAME`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvgraph.numbers_argument import numbers

if TYPE_CHECKING:
    from kvgraph.export.bundle import Bundle
    from kvgraph.runtime.target import Target

NAME = "build"
HELP = "compile a bundle for a target: ONNX Runtime, TensorRT, TensorRT-RTX"

_TENSORRT = ("tensorrt", "tensorrt-rtx")
_TARGETS = ("ort-cpu", *_TENSORRT)
# Flags that only engines have -> the field of TensorRTOptions.
_ENGINE_FLAGS = {
    "--max-batch": "max_batch",
    "--max-context": "max_context",
    "--prefill-chunk": "prefill_chunk",
    "--max-source": "max_source",
    "--engines": "engines",
    "--compute-capability": "compute_capabilities",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's flags."""
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="directory that kvgraph export or kvgraph quantize wrote"
    )
    parser.add_argument("--target", required=True, choices=_TARGETS, help="what to build")
    parser.add_argument(
        "--kernels",
        choices=("kvgraph", "onnxruntime"),
        help="ort-cpu only: kvgraph's own operators, or those of ONNX Runtime alone (default: kvgraph, if this "
        "installation has them)",
    )
    parser.add_argument(
        "--cache-dtype",
        choices=("float32", "float16"),
        help="ort-cpu only: what a float cache is kept in; float16 halves its memory, and cannot hold keys and values "
        "beyond 65504 (default: float32)",
    )
    parser.add_argument(
        "--standalone",
        metavar="DIR",
        help="also write a bundle of this target alone, which runs without BUNDLE: description, tokenizer, target",
    )
    parser.add_argument(
        "--force", action="store_true", help="with --standalone: replace a bundle that is there"
    )
    engine = parser.add_argument_group("engines of TensorRT and TensorRT-RTX")
    engine.add_argument("--max-batch", type=int, metavar="N", help="most rows (default 1)")
    engine.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="cache slots a row (default: the model's positions, at most 4096)",
    )
    engine.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="most new tokens a call (default: the context, at most 512)",
    )
    engine.add_argument(
        "--max-source",
        type=int,
        metavar="N",
        help="most tokens of a source, for a model with an encoder (default: its positions, at most 512)",
    )
    engine.add_argument(
        "--engines",
        choices=("one", "two"),
        help="one engine with a profile for each graph, or one per graph (default: one, if the weights are the same)",
    )
    engine.add_argument(
        "--compute-capability",
        dest="compute_capabilities",
        type=numbers("numbers such as 89 or 89,120"),
        metavar="89,120",
        help="GPUs to build for, TensorRT-RTX only (default: all that it knows)",
    )


def run(args: argparse.Namespace) -> int:
    """Build and print one line about the result."""
    from kvgraph.export.bundle import Bundle

    bundle = Bundle.open(args.bundle)
    bundle.require_whole("kvgraph build")
    bundle.verify_graphs()
    if args.standalone is not None:
        return _build_alone(bundle, args)
    if args.force:
        raise ValueError("--force is for --standalone DIR, a target is always replaced; leave it out")
    _print_target(_build(bundle, args))
    return 0


def _build(bundle: Bundle, args: argparse.Namespace) -> Target:
    return _build_tensorrt(bundle, args) if args.target in _TENSORRT else _build_ort(bundle, args)


def _build_alone(bundle: Bundle, args: argparse.Namespace) -> int:
    from kvgraph.export.targets.standalone import build_standalone
    from kvgraph.runtime.target import Target

    alone = build_standalone(bundle, args.standalone, lambda: _build(bundle, args), force=args.force)
    _print_target(Target.open(bundle, args.target))
    size = sum(entry.size for entry in alone.files.values())
    print(f"{alone.path}: the target {args.target} alone, {len(alone.files)} files, {size / 1e6:.1f} MB")
    return 0


def _print_target(target: Target) -> None:
    size = sum(entry.size for entry in target.files.values())
    devices = ", ".join(f"SM{capability}" for capability in target.compute_capabilities) or "CPU"
    print(
        f"{target.path}: {target.name} {target.runtime_version}, {devices}, {', '.join(target.files)}, "
        f"{size / 1e6:.1f} MB, {target.build_time_s:.1f} s"
    )


def _build_tensorrt(bundle: Bundle, args: argparse.Namespace) -> Target:
    if args.kernels is not None:
        raise ValueError(f"--kernels is for ort-cpu, the target is {args.target}; leave it out")
    if args.cache_dtype is not None:
        raise ValueError(f"--cache-dtype is for ort-cpu, the target is {args.target}; leave it out")
    from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt

    options = TensorRTOptions(**{name: getattr(args, name) for name in _ENGINE_FLAGS.values()})
    return build_tensorrt(bundle, args.target, options)


def _build_ort(bundle: Bundle, args: argparse.Namespace) -> Target:
    from kvgraph.export.targets.ort_cpu import build_ort_cpu

    for flag, name in _ENGINE_FLAGS.items():
        if getattr(args, name) is not None:
            raise ValueError(
                f"{flag} is for {' and '.join(_TENSORRT)}, the target is {args.target}; leave it out"
            )
    return build_ort_cpu(
        bundle, args.kernels or "kvgraph", report=print, cache_dtype=args.cache_dtype or "float32"
    )
