"""`kvgraph build --target tensorrt-rtx` and `--target tensorrt`: a bundle to engines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import ENCODE, GraphName
from kvgraph.export.targets.compute_capabilities import choose_capabilities
from kvgraph.export.targets.engine_builder import build_engine
from kvgraph.export.targets.profiles import choose_limits, profile_shapes
from kvgraph.export.targets.shared_weights import has_one_recipe, shares_weights
from kvgraph.export.targets.target_writer import BuiltTarget, new_target, require_weights, write_target
from kvgraph.export.targets.tensorrt_graph import bound_contract, lower_for_tensorrt
from kvgraph.runtime.target import Target, TargetGraph
from kvgraph.runtime.tensorrt_module import load_tensorrt

Engines = Literal["one", "two"]
ENGINES: tuple[str, ...] = get_args(Engines)

# Graph that an engine is made from -> graphs that it runs, a profile each. The prefill graph can do a decode step: with
# S = 1 and logit_positions = 0 it is the same computation, so one engine holds the weights once.
_ENGINES: dict[Engines, dict[GraphName, tuple[GraphName, ...]]] = {
    "one": {"prefill": ("decode", "prefill")},
    "two": {"prefill": ("prefill",), "decode": ("decode",)},
}


@dataclass(frozen=True, slots=True)
class TensorRTOptions:
    """What a build may be asked for; None stands for the default.

    Attributes:
        max_batch: Most rows (1).
        max_context: T, slots of a row of the cache (the model's positions, at most 4096).
        prefill_chunk: Most new tokens of a prefill call (512).
        max_source: Most tokens of a source, where there is an encoder (its positions, at most 512).
        engines: "one" engine with a profile for each graph, or "two" (one, where both graphs have the same weights).
        compute_capabilities: 89 for SM89; TensorRT-RTX only (all that it knows and that compute the bundle's type).
    """

    max_batch: int | None = None
    max_context: int | None = None
    prefill_chunk: int | None = None
    engines: Engines | None = None
    compute_capabilities: tuple[int, ...] | None = None
    max_source: int | None = None


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
    limits = choose_limits(
        bundle.contract, options.max_batch, options.max_context, options.prefill_chunk, options.max_source
    )
    engines = _choose_engines(bundle, options.engines)
    trt = load_tensorrt(flavour)
    capabilities = choose_capabilities(trt, flavour, bundle, options.compute_capabilities)
    started = time.monotonic()
    with new_target(bundle, flavour) as directory:
        graphs: dict[GraphName, TargetGraph] = {}
        for source, served in _made_from(bundle, engines).items():
            graph = lower_for_tensorrt(bundle.graph_path(source), source, bundle.contract, limits.max_context)
            profiles = {runs: profile_shapes(graph.inputs, runs, limits) for runs in served}
            chosen = capabilities if flavour == "tensorrt-rtx" else None
            file = "model.engine" if engines == "one" and source != ENCODE else f"{source}.engine"
            # Without a name for it, the engine is freed before the next is built: it holds all the weights.
            (directory / file).write_bytes(build_engine(trt, graph, list(profiles.values()), chosen))
            for index, (runs, shapes) in enumerate(profiles.items()):
                graphs[runs] = TargetGraph(file, source, index, shapes)
        contract = bound_contract(bundle.contract, limits.max_context, limits.max_source)
        built = BuiltTarget(trt.__version__, contract, graphs, capabilities, limits, {"engines": engines})
        write_target(directory, bundle, flavour, built, time.monotonic() - started)
    return Target.open(bundle, flavour)


def _made_from(bundle: Bundle, engines: Engines) -> Mapping[GraphName, tuple[GraphName, ...]]:
    """Graph that an engine is made from -> graphs that it runs."""
    encoder: dict[GraphName, tuple[GraphName, ...]] = {ENCODE: (ENCODE,)}
    return _ENGINES[engines] if bundle.contract.encoder is None else encoder | _ENGINES[engines]


def _choose_engines(bundle: Bundle, asked: Engines | None) -> Engines:
    """One engine where both graphs have the same recipe and read the same weights, unless two are asked for."""
    shared = shares_weights(bundle)
    if asked == "one" and not shared:
        different = "weights" if has_one_recipe(bundle) else "recipes"
        raise ValueError(
            f"{bundle.path}: prefill and decode have different {different}, which one engine cannot hold; "
            "build with --engines two"
        )
    return asked or ("one" if shared else "two")
