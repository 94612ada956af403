"""TensorRT and TensorRT-RTX: one API under two module names, loaded only when asked for."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import Any, Protocol, cast

from kvgraph.runtime.tensorrt_api import TensorRT

FLAVOURS = ("tensorrt-rtx", "tensorrt")

# The RTX bindings do not bring their libraries; this wheel of ONNX Runtime's provider does.
_RTX_BINDINGS = "tensorrt_rtx_bindings"
_RTX_LIBRARIES = "onnxruntime_ep_nv_tensorrt_rtx"
# In the order of their dependences.
_RTX_FILES = ("libcudart.so.*", "libtensorrt_rtx.so.*", "libtensorrt_onnxparser_rtx.so.*")


def load_tensorrt(flavour: str) -> TensorRT:
    """The module of a flavour, with its libraries loaded.

    Raises:
        ValueError: There is no such flavour.
        ImportError: It is not installed or does not load; the message names the extra to install.
    """
    if flavour not in FLAVOURS:
        raise ValueError(f"TensorRT flavour {flavour!r}, expected one of {', '.join(FLAVOURS)}")
    name, extra = (_RTX_BINDINGS, "rtx") if flavour == "tensorrt-rtx" else ("tensorrt", "tensorrt")
    try:
        if flavour == "tensorrt-rtx":
            _load_rtx_libraries()
        return cast("TensorRT", importlib.import_module(name))
    except ModuleNotFoundError as error:
        raise ImportError(f"{flavour} needs the package {error.name}; install kvgraph[{extra}]") from error
    except (ImportError, OSError) as error:
        raise ImportError(
            f"{flavour} is installed but does not load ({error}); reinstall kvgraph[{extra}]"
        ) from error


def _load_rtx_libraries() -> None:
    """Make the libraries' symbols global, where the bindings look for them."""
    spec = importlib.util.find_spec(_RTX_LIBRARIES)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"no module named {_RTX_LIBRARIES}", name=_RTX_LIBRARIES)
    directory = Path(spec.submodule_search_locations[0])
    for pattern in _RTX_FILES:
        file = next(iter(sorted(directory.glob(pattern))), None)
        if file is None:
            raise OSError(f"{directory} holds no {pattern}")
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def dtype_names(trt: TensorRT) -> dict[object, str]:
    """TensorRT's element types -> the contract's names."""
    return {
        trt.DataType.FLOAT: "float32",
        trt.DataType.HALF: "float16",
        trt.DataType.BF16: "bfloat16",
        trt.DataType.INT64: "int64",
        trt.DataType.INT8: "int8",
        trt.DataType.FP8: "float8e4m3fn",
    }


class MessageLog(Protocol):
    """A TensorRT logger that keeps what it is told."""

    def errors(self) -> list[str]:
        """Messages of errors, oldest first."""
        ...


def collect_messages(trt: TensorRT) -> MessageLog:
    """A logger for TensorRT objects; nothing is printed."""
    base: Any = trt.ILogger

    class CollectingLogger(base):  # type: ignore[misc]  # the base is known only once the flavour is chosen
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[tuple[object, str]] = []

        def log(self, severity: object, message: str) -> None:
            self.messages.append((severity, message))

        def errors(self) -> list[str]:
            worst = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)
            return [message for severity, message in self.messages if severity in worst]

    return cast("MessageLog", CollectingLogger())
