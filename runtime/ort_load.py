"""Opening a graph with ONNX Runtime: the package, the providers, the options, and what the graph must look like."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvgraph.export.contract import GraphSpec, TensorSpec
from kvgraph.runtime.element_types import element_type
from kvgraph.runtime.machine import int8_products_saturate
from kvgraph.runtime.threads import Threads

CPU_PROVIDER = "CPUExecutionProvider"
CUDA_PROVIDER = "CUDAExecutionProvider"
_EXTRAS = {CPU_PROVIDER: "kvgraph[cpu]", CUDA_PROVIDER: "kvgraph[gpu]"}

# Where these run is where the model runs; a few shape operators always stay on the CPU.
_HEAVY_OPERATORS = frozenset({"Attention", "Gemm", "MatMul", "MatMulNBits", "TensorScatter"})


def import_onnxruntime() -> Any:
    """The onnxruntime module.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise ImportError(
            "onnxruntime is not installed; install kvgraph[cpu], or kvgraph[gpu] for NVIDIA GPUs (one of them: "
            "the two packages overwrite each other)"
        ) from error


def runtime_errors() -> tuple[type[Exception], ...]:
    """What onnxruntime raises: its own errors have no common base but Exception."""
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    own = [
        value for value in vars(state).values() if isinstance(value, type) and issubclass(value, Exception)
    ]
    return (RuntimeError, *own)


def check_providers(providers: Sequence[str]) -> None:
    """Refuse providers that this onnxruntime lacks, which it would replace by the CPU with no more than a warning.

    Raises:
        ValueError: A provider is unknown or not in the installed package.
    """
    if not providers:
        raise ValueError(f"no execution provider given; choose from {', '.join(_EXTRAS)}")
    available = import_onnxruntime().get_available_providers()
    for provider in providers:
        if provider not in _EXTRAS:
            raise ValueError(
                f"execution provider {provider!r} is not supported; choose from {', '.join(_EXTRAS)}"
            )
        if provider not in available:
            raise ValueError(
                f"{provider} was asked for, the installed onnxruntime has {', '.join(available)}; "
                f"uninstall it and install {_EXTRAS[provider]}"
            )


def session_options(
    threads: Threads,
    mapped_weights: bool,
    library: Path | None = None,
    weights: Mapping[str, Any] = MappingProxyType({}),
    takes_turns: bool = False,
) -> Any:
    """Session options that all graphs share.

    Args:
        threads: What computes on a CPU.
        mapped_weights: Use the weights where they lie in the mapped file instead of in a repacked copy.
        library: The shared library of the operators that are not ONNX Runtime's own.
        weights: Initializers by name, as OrtValues that outlive the session; it uses them where they lie.
        takes_turns: Another session computes between two calls of this one.
    """
    options = import_onnxruntime().SessionOptions()
    options.log_severity_level = 3
    # A freshly filled cache holds denormals, over which Attention takes half as long again.
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    threads.configure(options, takes_turns)
    if library is not None:
        options.register_custom_ops_library(str(library))
    for name, value in weights.items():
        options.add_initializer(name, value)
    if mapped_weights:
        options.add_session_config_entry("session.disable_prepacking", "1")
    if int8_products_saturate():
        # Else INT8 activations become UINT8, and their kernels add pairs of products in 16 bits.
        options.add_session_config_entry("session.qdqisint8allowed", "1")
    return options


def load_graph(
    label: str, graph: bytes | Path, folder: Path, options: Any, providers: Sequence[str], device_id: int
) -> Any:
    """An `onnxruntime.InferenceSession` that really runs on the first of `providers`.

    Args:
        label: The graph's name in messages.
        graph: The ONNX file, or the bytes of one whose external data lies in `folder`.
        folder: Where the external data lies: the bundle, or a target that holds its own.
        options: From `session_options`.
        providers: Checked by `check_providers`.
        device_id: Of the GPU.

    Raises:
        RuntimeError: ONNX Runtime does not load the graph, or falls back to another provider.
    """
    onnxruntime = import_onnxruntime()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    on_gpu = providers[0] == CUDA_PROVIDER
    if on_gpu:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    settings = [{"device_id": str(device_id)} if provider == CUDA_PROVIDER else {} for provider in providers]
    try:
        session = onnxruntime.InferenceSession(
            str(graph) if isinstance(graph, Path) else graph,
            options,
            providers=list(providers),
            provider_options=settings,
        )
    except runtime_errors() as error:
        raise RuntimeError(
            f"{graph if isinstance(graph, Path) else label}: ONNX Runtime {onnxruntime.__version__} does not load it: "
            f"{error}; --verify tells whether the file was changed since it was written: export or build it again then"
        ) from error
    check_providers_in_use(label, session.get_providers(), providers)
    if on_gpu:
        placed = {
            part.ep_name: {node.op_type for node in part.get_nodes()}
            for part in session.get_provider_graph_assignment_info()
        }
        check_placement(label, placed, providers[0])
    return session


def device_in_use(session: Any) -> str:
    """Where a session runs by its own account: "cpu", or "cuda:0"."""
    if CUDA_PROVIDER in session.get_providers():
        return f"cuda:{session.get_provider_options()[CUDA_PROVIDER]['device_id']}"
    return "cpu"


def check_providers_in_use(label: str, used: Collection[str], asked: Iterable[str]) -> None:
    """Raise RuntimeError where a session dropped a provider that was asked for."""
    missing = [provider for provider in asked if provider not in used]
    if missing:
        raise RuntimeError(
            f"{label}: asked for {', '.join(missing)}, ONNX Runtime uses {', '.join(used)}; "
            "check the driver and the CUDA and cuDNN libraries that onnxruntime-gpu needs"
        )


def check_placement(label: str, placed: Mapping[str, Collection[str]], provider: str) -> None:
    """Raise RuntimeError where an operator that carries the work runs elsewhere than on `provider`.

    Args:
        label: The graph, for the message.
        placed: Provider -> operators that it runs.
        provider: Where they should run.
    """
    for other, operators in placed.items():
        stray = sorted(_HEAVY_OPERATORS & set(operators))
        if other != provider and stray:
            raise RuntimeError(
                f"{label}: {', '.join(stray)} run on {other}, expected {provider}: this onnxruntime has no kernel "
                f"for them there; install a newer {_EXTRAS[provider]} or ask for {other}"
            )


def check_interface(label: str, session: Any, spec: GraphSpec, extra_outputs: Collection[str]) -> None:
    """Compare a loaded graph's inputs and outputs with the contract.

    Args:
        label: The file, for the message.
        session: The `InferenceSession`.
        spec: What the contract says.
        extra_outputs: Outputs that may be there beside the contract's.

    Raises:
        ValueError: A name, dtype or dimension differs.
    """
    for kind, found, expected in (
        ("input", session.get_inputs(), spec.inputs),
        ("output", [arg for arg in session.get_outputs() if arg.name not in extra_outputs], spec.outputs),
    ):
        names, wanted = [arg.name for arg in found], [tensor.name for tensor in expected]
        for name in [*wanted, *names]:
            if (name in wanted) != (name in names):
                side = "the contract does not" if name in names else "the graph does not"
                other = "the graph" if name in names else "the contract"
                raise ValueError(
                    f"{label}: {kind} {name!r}: {other} has it, {side}; re-export with kvgraph export"
                )
        by_name = {arg.name: arg for arg in found}
        for tensor in expected:
            _check_tensor(f"{label}: {kind} {tensor.name!r}", by_name[tensor.name], tensor)


def _check_tensor(label: str, arg: Any, tensor: TensorSpec) -> None:
    expected = element_type(tensor.dtype).ort
    if arg.type != expected:
        raise ValueError(f"{label} is {arg.type}, contract says {expected}; re-export with kvgraph export")
    shape = list(arg.shape)
    # A symbolic dimension may have any name, or none where ONNX Runtime could not infer it.
    same = len(shape) == len(tensor.shape) and all(
        found == dim if isinstance(dim, int) else not isinstance(found, int)
        for found, dim in zip(shape, tensor.shape, strict=True)
    )
    if not same:
        raise ValueError(
            f"{label} has shape {shape}, contract says {list(tensor.shape)}; re-export with kvgraph export"
        )
