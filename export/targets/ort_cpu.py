"""`kvgraph build --target ort-cpu`: the bundle's graphs in operators and types that ONNX Runtime has on a CPU.

The weights are not copied. The built graphs name `weights.safetensors` as if they lay beside it, for ONNX Runtime
refuses external data outside of the folder it looks in; a session tells it that folder, the bundle, with
`session.model_external_initializers_file_folder_path`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, Contract, graph_file
from kvgraph.export.targets.ort_cpu_graph import lower_for_ort_cpu
from kvgraph.export.targets.target_writer import BuiltTarget, new_target, require_weights, write_target
from kvgraph.runtime.target import Target, TargetGraph

ORT_CPU = "ort-cpu"


def build_ort_cpu(bundle: Bundle) -> Target:
    """Write the bundle's graphs, lowered by `lower_for_ort_cpu`, to `targets/ort-cpu/`.

    The caches of a bfloat16 bundle become float32 too; the contract in target.json says so.

    Raises:
        ValueError: The bundle has no weights.
    """
    require_weights(bundle)
    started = time.monotonic()
    with new_target(bundle, ORT_CPU) as directory:
        for graph, content in lower_for_ort_cpu(bundle).items():
            (directory / graph_file(graph)).write_bytes(content)
        graphs = {graph: TargetGraph(graph_file(graph), graph, None, {}) for graph in GRAPHS}
        built = BuiltTarget(_onnxruntime_version(), widened_contract(bundle.contract), graphs)
        write_target(directory, bundle, ORT_CPU, built, time.monotonic() - started)
    return Target.open(bundle, ORT_CPU)


def widened_contract(contract: Contract) -> Contract:
    """The contract with float32 caches where they were bfloat16."""
    state = tuple(
        replace(tensor, dtype="float32") if tensor.dtype == "bfloat16" else tensor
        for tensor in contract.state
    )
    return replace(contract, state=state)


def _onnxruntime_version() -> str:
    """Of the package that this machine has, under either of its names; building needs neither."""
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "(none)"
