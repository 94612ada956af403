"""The CUDA calls that a session needs, over `cuda.bindings.runtime`: memory, one stream, captured graphs.

Every status is checked; a failed call raises RuntimeError with the call's name and CUDA's own words.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def load_cuda_runtime() -> Any:
    """The module `cuda.bindings.runtime`, which ships no type information.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise ImportError(
            "running an engine needs cuda-python (cuda.bindings); install cuda-python"
        ) from error


class DeviceBuffer:
    """Memory of the device, freed with this object.

    Attributes:
        address: Where it starts.
        nbytes: Its size.
    """

    def __init__(self, cuda: Cuda, nbytes: int) -> None:
        self.nbytes = nbytes
        self._cuda = cuda
        self.address = 0
        self.address = int(cuda.call("cudaMalloc", nbytes))

    def __del__(self) -> None:
        if self.address:
            self._cuda.release("cudaFree", self.address)


def pinned_array(cuda: Cuda, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array in host memory that the device copies from and to without a detour; freed with its last view."""
    kind: np.dtype[Any] = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    address = int(cuda.call("cudaMallocHost", nbytes))
    memory = (ctypes.c_byte * nbytes).from_address(address)
    # Every view of the array keeps `memory` alive, so none can outlive what it shows.
    weakref.finalize(memory, cuda.release, "cudaFreeHost", address)
    return np.ctypeslib.as_array(memory).view(kind).reshape(shape)


class CapturedGraph:
    """Work of a stream that was recorded once and can be launched again, freed with this object."""

    def __init__(self, cuda: Cuda, handle: Any) -> None:
        self._cuda = cuda
        self._handle = handle

    def launch(self) -> None:
        """Queue the recorded work once more."""
        self._cuda.call("cudaGraphLaunch", self._handle, self._cuda.stream)

    def __del__(self) -> None:
        self._cuda.release("cudaGraphExecDestroy", self._handle)


class Cuda:
    """One device and one stream; everything that a session does is queued on that stream.

    Args:
        device: Which GPU.
        runtime: Stands in for `cuda.bindings.runtime` in tests.

    Raises:
        ImportError: cuda-python is not installed.
        RuntimeError: There is no such device, or no driver for it.
    """

    def __init__(self, device: int = 0, runtime: Any = None) -> None:
        self._runtime = load_cuda_runtime() if runtime is None else runtime
        self.device = device
        try:
            self.call("cudaSetDevice", device)
        except RuntimeError as error:
            raise RuntimeError(f"no NVIDIA GPU {device} that CUDA can use: {error}") from error
        # Not the default stream: that one cannot be captured.
        self.stream: Any = self.call("cudaStreamCreate")

    def call(self, name: str, *arguments: Any) -> Any:
        """What a CUDA function returns beside its status.

        Raises:
            RuntimeError: The status is an error.
        """
        status, *results = getattr(self._runtime, name)(*arguments)
        if int(status) != 0:
            text = self._runtime.cudaGetErrorString(status)[1]
            words = text.decode() if isinstance(text, bytes) else str(text)
            raise RuntimeError(f"{name} failed on device {self.device}: {words} (CUDA error {int(status)})")
        return results[0] if results else None

    def release(self, name: str, handle: Any) -> None:
        """Free something while its owner is collected, when an error can only be left unsaid."""
        getattr(self._runtime, name)(handle)

    @property
    def compute_capability(self) -> int:
        """89 for SM89."""
        attributes = self._runtime.cudaDeviceAttr
        major = self.call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMajor, self.device)
        minor = self.call("cudaDeviceGetAttribute", attributes.cudaDevAttrComputeCapabilityMinor, self.device)
        return 10 * int(major) + int(minor)

    def fill_zero(self, buffer: DeviceBuffer) -> None:
        """Fill a buffer with zero bytes."""
        self.call("cudaMemsetAsync", buffer.address, 0, buffer.nbytes, self.stream)

    def upload(self, source: NDArray[Any], address: int) -> None:
        """Copy a contiguous array to the device; it may be changed once `synchronize` has returned."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", address, source.ctypes.data, source.nbytes, kind, self.stream)

    def download(self, address: int, target: NDArray[Any]) -> None:
        """Copy from the device into a contiguous array; the content is there once `synchronize` has returned."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", target.ctypes.data, address, target.nbytes, kind, self.stream)

    def copy_strips(
        self,
        source: int,
        target: int,
        *,
        strip_bytes: int,
        stride_bytes: int,
        count: int,
        source_stride_bytes: int | None = None,
    ) -> None:
        """Copy `count` strips within the device that lie `stride_bytes` apart, in the source too or as it says."""
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self.call(
            "cudaMemcpy2DAsync",
            target,
            stride_bytes,
            source,
            stride_bytes if source_stride_bytes is None else source_stride_bytes,
            strip_bytes,
            count,
            kind,
            self.stream,
        )

    def synchronize(self) -> None:
        """Wait for the stream."""
        self.call("cudaStreamSynchronize", self.stream)

    def capture(self, enqueue: Callable[[], None]) -> CapturedGraph:
        """Record what `enqueue` puts on the stream, without running it.

        Raises:
            RuntimeError: The work cannot be captured.
        """
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", self.stream, mode)
        try:
            enqueue()
        finally:
            # Ends the capture also where enqueue failed: the stream would stay unusable.
            status, graph = self._runtime.cudaStreamEndCapture(self.stream)
        if int(status) != 0:
            raise RuntimeError(
                f"cudaStreamEndCapture failed on device {self.device} (CUDA error {int(status)})"
            )
        executable = self.call("cudaGraphInstantiate", graph, 0)
        self.call("cudaGraphDestroy", graph)
        return CapturedGraph(self, executable)
