"""`kvgraph build --target tensorrt-rtx` and `--target tensorrt`: a bundle to engines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import onnx

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GraphName
from kvgraph.export.targets.engine_builder import build_engine
from kvgraph.export.targets.profiles import choose_limits, profile_shapes
from kvgraph.export.targets.target_writer import BuiltTarget, new_target, require_weights, write_target
from kvgraph.export.targets.tensorrt_graph import bound_contract, lower_for_tensorrt
from kvgraph.runtime.cuda import Cuda
from kvgraph.runtime.target import Target, TargetGraph
from kvgraph.runtime.tensorrt_api import TensorRT
from kvgraph.runtime.tensorrt_module import load_tensorrt

Engines = Literal["one", "two"]
ENGINES: tuple[str, ...] = get_args(Engines)

# Graph that an engine is made from -> graphs that it runs, a profile each. The prefill graph can do a decode step: with
# S = 1 and logit_positions = 0 it is the same computation, so one engine holds the weights once.
_ENGINES: dict[Engines, dict[GraphName, tuple[GraphName, ...]]] = {
    "one": {"prefill": ("decode", "prefill")},
    "two": {"prefill": ("prefill",), "decode": ("decode",)},
}

# Turing computes matrix products in float16 alone: TensorRT says "FP32 GEMM is not supported" there, and has no
# bfloat16 below Ampere.
_TURING = 75


@dataclass(frozen=True, slots=True)
class TensorRTOptions:
    """What a build may be asked for; None stands for the default.

    Attributes:
        max_batch: Most rows (1).
        max_context: T, slots of a row of the cache (the model's positions, at most 4096).
        prefill_chunk: Most new tokens of a prefill call (512).
        engines: "one" engine with a profile for each graph, or "two" (one, where both graphs have the same weights).
        compute_capabilities: 89 for SM89; TensorRT-RTX only (all that it knows and that compute the bundle's type).
    """

    max_batch: int | None = None
    max_context: int | None = None
    prefill_chunk: int | None = None
    engines: Engines | None = None
    compute_capabilities: tuple[int, ...] | None = None


def build_tensorrt(bundle: Bundle, flavour: str, options: TensorRTOptions | None = None) -> Target:
    """Build the engines of a bundle and write them to `targets/<flavour>/`, replacing what is there.

    Args:
        bundle: Canonical or quantized; its files are read and not changed.
        flavour: "tensorrt-rtx", which needs no GPU to build, or "tensorrt", which builds on the GPU that it builds for.
        options: See `TensorRTOptions`.

    Raises:
        ImportError: The flavour is not installed.
        ValueError: An option is out of range or does not fit the bundle.
        RuntimeError: TensorRT does not build the graphs.
    """
    options = options or TensorRTOptions()
    require_weights(bundle)
    limits = choose_limits(bundle.contract, options.max_batch, options.max_context, options.prefill_chunk)
    engines = _choose_engines(bundle, options.engines)
    trt = load_tensorrt(flavour)
    capabilities = _capabilities(trt, flavour, bundle, options.compute_capabilities)
    started = time.monotonic()
    with new_target(bundle, flavour) as directory:
        graphs: dict[GraphName, TargetGraph] = {}
        for source, served in _ENGINES[engines].items():
            graph = lower_for_tensorrt(bundle.graph_path(source), source, bundle.contract, limits.max_context)
            profiles = {runs: profile_shapes(graph.inputs, runs, limits) for runs in served}
            chosen = capabilities if flavour == "tensorrt-rtx" else None
            engine = build_engine(trt, graph, list(profiles.values()), chosen)
            file = f"{source}.engine" if engines == "two" else "model.engine"
            (directory / file).write_bytes(engine)
            for index, (runs, shapes) in enumerate(profiles.items()):
                graphs[runs] = TargetGraph(file, source, index, shapes)
        contract = bound_contract(bundle.contract, limits.max_context)
        built = BuiltTarget(trt.__version__, contract, graphs, capabilities, limits, {"engines": engines})
        write_target(directory, bundle, flavour, built, time.monotonic() - started)
    return Target.open(bundle, flavour)


def _choose_engines(bundle: Bundle, asked: Engines | None) -> Engines:
    """One engine where both graphs read the same weights, unless two are asked for."""
    shared = _weights(bundle, "prefill") == _weights(bundle, "decode")
    if asked == "one" and not shared:
        raise ValueError(
            f"{bundle.path}: prefill and decode have different weights, which one engine cannot hold; "
            "build with --engines two"
        )
    return asked or ("one" if shared else "two")


def _weights(bundle: Bundle, graph: GraphName) -> set[tuple[tuple[str, str], ...]]:
    """Where a graph's external data lie: location, offset and length of each tensor."""
    model = onnx.load(bundle.graph_path(graph), load_external_data=False)
    return {
        tuple(sorted((entry.key, entry.value) for entry in tensor.external_data))
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


def _capabilities(
    trt: TensorRT, flavour: str, bundle: Bundle, asked: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The compute capabilities to build for, 89 for SM89."""
    if flavour == "tensorrt":
        if asked is not None:
            raise ValueError(
                "--compute-capability is for TensorRT-RTX: TensorRT builds for the GPU of the machine it builds on; "
                "leave the flag out, or build with --target tensorrt-rtx"
            )
        found = (_device_capability(),)
        _refuse_turing(bundle, found)
        return found
    known = sorted(
        int(name[2:]) for name in dir(trt.ComputeCapability) if name.startswith("SM") and name[2:].isdigit()
    )
    if asked is None:
        return tuple(known if bundle.dtype == "float16" else [one for one in known if one > _TURING])
    unknown = [capability for capability in asked if capability not in known]
    if unknown or not asked:
        raise ValueError(
            f"--compute-capability {','.join(map(str, unknown))}: TensorRT-RTX {trt.__version__} builds for "
            f"{', '.join(map(str, known))}; data-centre GPUs such as 90 and 100 need --target tensorrt"
        )
    _refuse_turing(bundle, asked)
    return tuple(dict.fromkeys(asked))


def _device_capability() -> int:
    try:
        return Cuda().compute_capability
    except RuntimeError as error:
        raise RuntimeError(
            f"TensorRT builds on the GPU that it builds for, and this machine offers none ({error}); "
            "--target tensorrt-rtx builds without one"
        ) from error


def _refuse_turing(bundle: Bundle, capabilities: Sequence[int]) -> None:
    if _TURING in capabilities and bundle.dtype != "float16":
        reason = (
            "has no bfloat16" if bundle.dtype == "bfloat16" else "computes matrix products in float16 alone"
        )
        raise ValueError(
            f"{bundle.path}: the bundle is {bundle.dtype}, SM75 {reason}; leave 75 out of --compute-capability, "
            "or export with --dtype float16"
        )
