"""Which GPUs an engine is built for, and which of them have the number formats of a bundle."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.cuda import Cuda
from kvgraph.runtime.tensorrt_api import TensorRT


@dataclass(frozen=True, slots=True)
class _Format:
    """What TensorRT needs for a number format.

    Attributes:
        least: The oldest compute capability that has it, 89 for SM89.
        lacking: What is to be said of an older one.
        remedy: What a user can do instead.
    """

    least: int
    lacking: str
    remedy: str


_TURING_REMEDY = "export with --dtype float16"
# Turing says "FP32 GEMM is not supported"; of the quantized types, Myelin says that they are hardware-specific.
_FORMATS = {
    "float32": _Format(80, "computes matrix products in float16 alone", _TURING_REMEDY),
    "bfloat16": _Format(80, "has no bfloat16", _TURING_REMEDY),
    "int4": _Format(80, "has no int4", "choose an INT8 recipe"),
    "float8": _Format(89, "has no 8-bit floats", "choose an INT8 recipe"),
    "float4": _Format(
        100, "has no 4-bit floats, which begin with Blackwell", "choose an INT4 or INT8 recipe"
    ),
}


def choose_capabilities(
    trt: TensorRT, flavour: str, bundle: Bundle, asked: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The compute capabilities to build for, 89 for SM89.

    Args:
        trt: From `load_tensorrt`.
        flavour: "tensorrt-rtx", or "tensorrt", which builds for the GPU of this machine.
        bundle: What is built.
        asked: What the user wants; None: all that TensorRT-RTX knows and that have the bundle's formats.

    Raises:
        ValueError: A capability is unknown, or lacks a format of the bundle.
        RuntimeError: This machine offers no GPU, which the flavour needs.
    """
    if flavour == "tensorrt":
        if asked is not None:
            raise ValueError(
                "--compute-capability is for TensorRT-RTX: TensorRT builds for the GPU of the machine it builds on; "
                "leave the flag out, or build with --target tensorrt-rtx"
            )
        found = (_device_capability(),)
        _refuse_older(bundle, found)
        return found
    known = sorted(
        int(name[2:]) for name in dir(trt.ComputeCapability) if name.startswith("SM") and name[2:].isdigit()
    )
    if asked is None:
        least = max((_FORMATS[name].least for _, name in _formats(bundle)), default=0)
        return tuple(one for one in known if one >= least)
    unknown = [capability for capability in asked if capability not in known]
    if unknown or not asked:
        raise ValueError(
            f"--compute-capability {','.join(map(str, unknown))}: TensorRT-RTX {trt.__version__} builds for "
            f"{', '.join(map(str, known))}; data-centre GPUs such as 90 and 100 need --target tensorrt"
        )
    _refuse_older(bundle, asked)
    return tuple(dict.fromkeys(asked))


def _device_capability() -> int:
    try:
        return Cuda().compute_capability
    except RuntimeError as error:
        raise RuntimeError(
            f"TensorRT builds on the GPU that it builds for, and this machine offers none ({error}); "
            "--target tensorrt-rtx builds without one"
        ) from error


def _refuse_older(bundle: Bundle, capabilities: tuple[int, ...]) -> None:
    for what, name in _formats(bundle):
        need = _FORMATS[name]
        for capability in capabilities:
            if capability < need.least:
                raise ValueError(
                    f"{bundle.path}: {what}, SM{capability} {need.lacking}; leave {capability} out of "
                    f"--compute-capability, or {need.remedy}"
                )


def _formats(bundle: Bundle) -> Iterator[tuple[str, str]]:
    """What of a bundle needs a format, and the format."""
    if bundle.dtype in _FORMATS:
        yield f"the bundle is {bundle.dtype}", bundle.dtype
    dtypes = dict.fromkeys(entry["dtype"] for entry in bundle.weights.values())
    dtypes |= dict.fromkeys(tensor.dtype for tensor in bundle.contract.state)
    for dtype in dtypes:
        name = next((name for name in ("int4", "float8", "float4") if dtype.startswith(name)), None)
        if name is not None:
            yield f"the bundle has {dtype} tensors", name
