"""`kvgraph build --target ort-cpu`: the bundle's graphs in operators and types that ONNX Runtime has on a CPU.

There are two forms. With `kernels="kvgraph"` matrix products and attention are kvgraph's own operators, and the target
holds the weights in their layout: it needs the library of `kvgraph.runtime.kernels` to run, and the bundle for no more
than its description. With `kernels="onnxruntime"` the graphs are those of the bundle with only that replaced which ONNX
Runtime lacks, and the weights are not copied: the graphs name `weights.safetensors` as if it lay beside them, for ONNX
Runtime refuses external data outside of the folder it looks in; a session tells it that folder, the bundle, with
`session.model_external_initializers_file_folder_path`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, get_args

import onnx_ir as ir

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import Contract, GraphName, StateTensor, graph_file
from kvgraph.export.packed.target_weights import TargetWeights
from kvgraph.export.passes import packed_operators as packed
from kvgraph.export.passes.matching import made_by
from kvgraph.export.passes.narrow_caches import narrow_caches
from kvgraph.export.targets.ort_cpu_graph import lower_for_kernels, lower_for_ort_cpu
from kvgraph.export.targets.target_writer import BuiltTarget, new_target, require_weights, write_target
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.runtime.kernels import library_path
from kvgraph.runtime.target import Target, TargetGraph

ORT_CPU = "ort-cpu"
Kernels = Literal["kvgraph", "onnxruntime"]
KERNELS: tuple[str, ...] = get_args(Kernels)
CacheDtype = Literal["float32", "float16"]


def build_ort_cpu(
    bundle: Bundle,
    kernels: Kernels = "kvgraph",
    report: Callable[[str], None] = lambda line: None,
    *,
    cache_dtype: CacheDtype = "float32",
) -> Target:
    """Write the bundle's graphs, lowered for a CPU, to `targets/ort-cpu/`.

    The caches of a bundle in bfloat16, and in kvgraph's kernels of one in float16, become float32 too; INT8 and FP8
    ones, which kvgraph's kernels write in place, have scatter form there. The contract in target.json says so.

    Args:
        bundle: What to build; its own files stay as they are.
        kernels: "kvgraph": with kvgraph's operators, if this machine has their library; "onnxruntime": without.
        report: Takes a line on what is about to be built.
        cache_dtype: What kvgraph's kernels keep a float cache in. "float16" takes half the memory, and less time to
            read where the context is long; keys and values beyond 65504 become infinite, which nothing can tell
            before the model runs: `kvgraph compare` does.

    Raises:
        ValueError: The bundle has no weights, or the cache cannot be of that type.
    """
    require_weights(bundle)
    if kernels == "kvgraph" and library_path() is None:
        report("kvgraph's CPU kernels are not in this installation; building for those of ONNX Runtime")
        kernels = "onnxruntime"
    if cache_dtype != "float32" and kernels != "kvgraph":
        raise ValueError(
            f"a {cache_dtype} cache is read by kvgraph's CPU kernels alone, the target is for those of ONNX Runtime; "
            "leave --cache-dtype out, or build with --kernels kvgraph where they are compiled"
        )
    started = time.monotonic()
    with new_target(bundle, ORT_CPU) as directory:
        built = (
            _fill_packed(directory, bundle, report, cache_dtype)
            if kernels == "kvgraph"
            else _fill_plain(directory, bundle, report)
        )
        write_target(directory, bundle, ORT_CPU, built, time.monotonic() - started)
    return Target.open(bundle, ORT_CPU)


def _fill_packed(
    directory: Path, bundle: Bundle, report: Callable[[str], None], cache_dtype: CacheDtype
) -> BuiltTarget:
    models = lower_for_kernels(bundle)
    if cache_dtype == "float16":
        _require_float_cache(bundle)
        for model in models.values():
            narrow_caches(model, {tensor.name for tensor in bundle.contract.state})
    weights = TargetWeights(list(models.values()))
    report(_memory(dict(zip(models, weights.sizes, strict=True)), weights.size))
    weights.place()
    for graph, model in models.items():
        (directory / graph_file(graph)).write_bytes(ir.to_proto(model).SerializeToString())
    digest = weights.write(directory / WEIGHTS_FILE)
    graphs: dict[GraphName, TargetGraph] = {}
    for graph in bundle.contract.graphs:
        source: GraphName = graph if graph in models else "prefill"
        graphs[graph] = TargetGraph(graph_file(source), source, None, {})
    contract = cache_contract(
        widened_contract(bundle.contract, ("bfloat16", "float16")), list(models.values())
    )
    options = {"kernels": "kvgraph"} | ({"cache_dtype": cache_dtype} if cache_dtype != "float32" else {})
    return BuiltTarget(
        _onnxruntime_version(), contract, graphs, options=options, hashes={WEIGHTS_FILE: digest}
    )


def _fill_plain(directory: Path, bundle: Bundle, report: Callable[[str], None]) -> BuiltTarget:
    size = bundle.files[WEIGHTS_FILE].size
    report(f"weights {size / 1e6:.1f} MB, the bundle's own; ONNX Runtime may repack them for each graph")
    for graph, content in lower_for_ort_cpu(bundle).items():
        (directory / graph_file(graph)).write_bytes(content)
    graphs = {graph: TargetGraph(graph_file(graph), graph, None, {}) for graph in bundle.contract.graphs}
    options = {"kernels": "onnxruntime"}
    return BuiltTarget(_onnxruntime_version(), widened_contract(bundle.contract), graphs, options=options)


def _memory(sizes: dict[GraphName, int], total: int) -> str:
    """What the weights take on the disk and, mapped from there, in memory."""
    if len(sizes) == 1:
        return f"weights {total / 1e6:.1f} MB, one copy for prefill and decode"
    parts = ", ".join(f"{graph} {size / 1e6:.1f} MB" for graph, size in sizes.items())
    return f"weights {total / 1e6:.1f} MB: {parts}"


def widened_contract(contract: Contract, dtypes: tuple[str, ...] = ("bfloat16",)) -> Contract:
    """The contract with float32 caches, an encoder's included, where they were of one of `dtypes`."""
    state = tuple(
        replace(tensor, dtype="float32") if tensor.dtype in dtypes else tensor for tensor in contract.state
    )
    encoder = contract.encoder
    if encoder is not None:
        cross = (
            replace(tensor, dtype="float32") if tensor.dtype in dtypes else tensor for tensor in encoder.cross
        )
        encoder = replace(encoder, cross=tuple(cross))
    return replace(contract, state=state, encoder=encoder)


def cache_contract(contract: Contract, models: Sequence[ir.Model]) -> Contract:
    """The contract with the caches as kvgraph's kernels keep them in these graphs.

    Raises:
        ValueError: The graphs keep a cache in different ways.
    """
    state: list[StateTensor] = []
    for tensor in contract.state:
        kept = {_kept(tensor, model.graph) for model in models if _has_input(model.graph, tensor.name)}
        if len(kept) != 1:
            raise ValueError(
                f"{tensor.name!r} is kept in {len(kept)} ways by the graphs, expected one; build with --kernels "
                "onnxruntime"
            )
        state += kept
    return replace(contract, state=tuple(state))


def _has_input(graph: ir.Graph, name: str) -> bool:
    return any(value.name == name for value in graph.inputs)


def _kept(tensor: StateTensor, graph: ir.Graph) -> StateTensor:
    """Codes that an operator of ours reads are written by it as well: scatter form, whatever their type."""
    present = next(value for value in graph.outputs if value.name == tensor.output)
    if made_by(present, packed.ATTENTION, packed.DOMAIN) is None:
        return tensor
    narrow = present.dtype == ir.DataType.FLOAT16
    return replace(tensor, form="scatter", dtype="float16" if narrow else tensor.dtype)


def _require_float_cache(bundle: Bundle) -> None:
    dtypes = sorted({tensor.dtype for tensor in bundle.contract.state})
    if "int8" in dtypes or "float8e4m3fn" in dtypes:
        raise ValueError(f"the cache is {', '.join(dtypes)} already; leave --cache-dtype out")


def _onnxruntime_version() -> str:
    """Of the package that this machine has, under either of its names; building needs neither."""
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "(none)"
