from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

from kvgraph.runtime.cuda import Cuda, DeviceBuffer, load_cuda_runtime, pinned_array

CALLS = [
    "cudaDeviceGetAttribute", "cudaFree", "cudaFreeHost", "cudaGetErrorString", "cudaGraphDestroy",
    "cudaGraphExecDestroy", "cudaGraphInstantiate", "cudaGraphLaunch", "cudaMalloc", "cudaMallocHost",
    "cudaMemcpy2DAsync", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaSetDevice", "cudaStreamBeginCapture",
    "cudaStreamCreate", "cudaStreamEndCapture", "cudaStreamSynchronize",
]  # fmt: skip


@pytest.fixture
def gpu(fake_gpu: Any) -> Any:
    return fake_gpu()


@pytest.fixture
def cuda(gpu: Any) -> Cuda:
    return Cuda(runtime=gpu)


def test_arrays_go_to_the_device_and_back(cuda: Cuda) -> None:
    source = np.arange(6, dtype=np.int64).reshape(2, 3)
    buffer, target = DeviceBuffer(cuda, source.nbytes), np.empty_like(source)
    cuda.upload(source, buffer.address)
    cuda.download(buffer.address, target)
    cuda.synchronize()
    np.testing.assert_array_equal(target, source)


def test_memory_is_freed_with_its_last_view(cuda: Cuda, gpu: Any) -> None:
    array = pinned_array(cuda, (2, 3), np.float32)
    view = array[1]
    del array
    gc.collect()
    assert len(gpu.memory) == 1
    del view
    gc.collect()
    assert not gpu.memory


def test_a_failed_call_is_named(gpu: Any) -> None:
    message = (
        r"no NVIDIA GPU 3 that CUDA can use: cudaSetDevice failed on device 3: invalid .* \(CUDA error 101\)"
    )
    with pytest.raises(RuntimeError, match=message):
        Cuda(3, gpu)


def test_memory_that_is_not_to_be_had_is_an_error(
    cuda: Cuda, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "cudaMalloc", lambda size: (2, None))
    with pytest.raises(RuntimeError, match="cudaMalloc failed on device 0: out of memory"):
        DeviceBuffer(cuda, 8)


def test_a_capture_that_fails_ends(cuda: Cuda, gpu: Any) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cuda.capture(fail)
    assert gpu.recording is None


def test_compute_capability_is_one_number(cuda: Cuda) -> None:
    assert cuda.compute_capability == 89


def test_without_cuda_python_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(ImportError, match=r"needs cuda-python .* install cuda-python"):
        load_cuda_runtime()


def test_the_real_bindings_have_every_call_and_constant(fake_gpu: Any) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")
    assert not {name for name in CALLS if not callable(getattr(runtime, name, None))}
    assert not {name for name in CALLS if not hasattr(fake_gpu, name)}
    for group in ("cudaDeviceAttr", "cudaMemcpyKind", "cudaStreamCaptureMode"):
        assert not {
            name for name in vars(getattr(fake_gpu, group)) if not hasattr(getattr(runtime, group), name)
        }
