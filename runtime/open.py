"""Choosing the runtime for a bundle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.kernels import library_path
from kvgraph.runtime.machine import why_no_gpu
from kvgraph.runtime.session import Session
from kvgraph.runtime.target import Target
from kvgraph.runtime.threads import Threads

if TYPE_CHECKING:
    from kvgraph.runtime.ort import OrtSession
    from kvgraph.runtime.trt import TrtSession

ORT_CPU = "ort-cpu"
TENSORRT_TARGETS = ("tensorrt", "tensorrt-rtx")


def open_session(
    bundle: Bundle,
    target: str | None = None,
    device: str | None = None,
    *,
    threads: int | Threads | None = None,
    verify: bool = False,
) -> Session:
    """A session over a bundle's canonical graphs, or over what `kvgraph build` made of them.

    Of a bundle that holds a target alone, that is what runs.

    Args:
        bundle: What to run.
        target: Name of a target; None runs prefill.onnx and decode.onnx themselves under ONNX Runtime.
        device: "cpu", "cuda" or "cuda:1"; default "cpu", and "cuda" for targets that are made for a GPU.
        threads: What computes on a CPU: a number of threads, default one a core, or more about them.
        verify: Hash the files of the target.

    Raises:
        ImportError: The runtime is not installed; the message names the extra to install.
        FileNotFoundError: The target was not built.
        ValueError: The target's name is unknown, it belongs to another bundle, or the device does not suit it.
    """
    target = bundle.choose_target(target)
    if target is not None and target not in (ORT_CPU, *TENSORRT_TARGETS):
        known = ", ".join((ORT_CPU, *TENSORRT_TARGETS))
        raise ValueError(
            f"target {target!r} is unknown, expected one of {known}; without a target ONNX Runtime runs the bundle's "
            "own graphs, on the device cpu or cuda"
        )
    kind, device_id = _parse_device(device or ("cpu" if target in (None, ORT_CPU) else "cuda"))
    wanted = {None: kind, ORT_CPU: "cpu"}.get(target, "cuda")
    if kind != wanted:
        raise ValueError(f"target {target!r} runs on {wanted}, not on {device!r}; leave the device out")
    if threads is not None and kind != "cpu":
        raise ValueError(f"threads are for a CPU, but the device is {kind}; leave them out")
    built = None if target is None else Target.open(bundle, target, verify)
    if kind == "cuda" and (reason := why_no_gpu()) is not None:
        raise RuntimeError(f"device {device or kind}: there is no GPU, {reason}; run on the device cpu")
    if built is None or target == ORT_CPU:
        return _open_ort(bundle, built, kind, device_id, threads)
    return trt_session(bundle)(bundle, built.name, device=device_id)


def _open_ort(
    bundle: Bundle, target: Target | None, kind: str, device_id: int, threads: int | Threads | None
) -> Session:
    from kvgraph.runtime.ort_load import CPU_PROVIDER, CUDA_PROVIDER

    providers = (CUDA_PROVIDER,) if kind == "cuda" else (CPU_PROVIDER,)
    session = ort_session(bundle)
    if target is None:
        return session(bundle, providers=providers, device_id=device_id, threads=threads)
    sources = {entry.source: target.path / entry.file for entry in target.graphs.values()}
    own = target.options.get("kernels") == "kvgraph"
    return session(
        bundle,
        providers=providers,
        device_id=device_id,
        threads=threads,
        graphs={graph: path.read_bytes() for graph, path in sources.items()},
        contract=target.contract,
        folder=target.path if own else None,
        library=_require_library(bundle, target) if own else None,
        target=target.name,
    )


def _require_library(bundle: Bundle, target: Target) -> Path:
    """The operators that a target was built with."""
    library = library_path()
    if library is None:
        raise RuntimeError(
            f"{target.path}: built for kvgraph's own CPU kernels, which this installation lacks: it was made without a "
            f"C++ compiler. Install kvgraph where there is one, or build the target again: "
            f"{bundle.build_command(target.name)} --kernels onnxruntime"
        )
    return library


def ort_session(bundle: Bundle) -> type[OrtSession]:
    """The session that runs a bundle's ONNX graphs."""
    from kvgraph.runtime.ort import OrtSession
    from kvgraph.runtime.ort_encoder import OrtEncoderSession

    return OrtSession if bundle.contract.encoder is None else OrtEncoderSession


def trt_session(bundle: Bundle) -> type[TrtSession]:
    """The session that runs a bundle's engines."""
    from kvgraph.runtime.trt import TrtSession
    from kvgraph.runtime.trt_encoder import TrtEncoderSession

    return TrtSession if bundle.contract.encoder is None else TrtEncoderSession


def _parse_device(device: str) -> tuple[str, int]:
    match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", device)
    if match is None or (match[1] == "cpu" and match[2] is not None):
        raise ValueError(f"device is {device!r}, expected cpu, cuda or cuda:N")
    return match[1], int(match[2] or 0)
