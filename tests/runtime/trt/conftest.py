"""A GPU and a TensorRT that are not there, so that the session can be tested without either.

`FakeGpu` has the functions of `cuda.bindings.runtime` over host memory. `FakeTensorRT` deserializes an "engine" that is
really the lowered ONNX graph, and runs it with ONNX Runtime on the memory that it was given the addresses of. Both are
as strict as the real ones: fresh memory is full of NaN, past and present have to be one buffer, shapes have to lie in
the profile, what is captured is what was bound then, and a step can only be captured after one like it has run.
"""

# ruff: noqa: N802, N815 -- the names are those of CUDA

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets import tensorrt
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.runtime.open import trt_session
from kvgraph.runtime.target import Target
from kvgraph.runtime.tensorrt_module import load_tensorrt
from kvgraph.runtime.trt import TrtSession

OK = 0
STREAM = 7
NUMPY = {
    onnx.TensorProto.FLOAT: np.float32,
    onnx.TensorProto.FLOAT16: np.float16,
    onnx.TensorProto.INT64: np.int64,
    onnx.TensorProto.INT8: np.int8,
}
TRT_NAMES = {
    onnx.TensorProto.FLOAT: "FLOAT",
    onnx.TensorProto.FLOAT16: "HALF",
    onnx.TensorProto.INT64: "INT64",
    onnx.TensorProto.INT8: "INT8",
}


class FakeGpu:
    """Stands in for the module `cuda.bindings.runtime`, and counts what was done."""

    cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=0, cudaDevAttrComputeCapabilityMinor=1)
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, compute_capability: int = 89) -> None:
        self.memory: dict[int, Any] = {}
        self.compute_capability = compute_capability
        self.recording: list[Callable[[], None]] | None = None
        self.executed = self.captured = self.launched = self.copied = 0
        # An input whose shape TensorRT does not take.
        self.refuse: str | None = None

    def cudaSetDevice(self, device):
        return (OK if device == 0 else 101,)

    def cudaGetErrorString(self, error):
        return OK, b"invalid device ordinal" if error == 101 else b"out of memory"

    def cudaStreamCreate(self):
        return OK, STREAM

    def cudaDeviceGetAttribute(self, attribute, device):
        return OK, divmod(self.compute_capability, 10)[attribute]

    def cudaMalloc(self, size):
        buffer = (ctypes.c_ubyte * size)()
        ctypes.memset(buffer, 0xFF, size)
        self.memory[ctypes.addressof(buffer)] = buffer
        return OK, ctypes.addressof(buffer)

    cudaMallocHost = cudaMalloc

    def cudaFree(self, address):
        del self.memory[address]
        return (OK,)

    cudaFreeHost = cudaFree

    def cudaMemsetAsync(self, address, value, size, stream):
        assert self.recording is None
        ctypes.memset(address, value, size)
        return (OK,)

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        assert (stream, self.recording) == (STREAM, None)
        ctypes.memmove(target, source, size)
        return (OK,)

    def cudaMemcpy2DAsync(self, target, target_pitch, source, source_pitch, width, height, kind, stream):
        assert (stream, self.recording, kind) == (STREAM, None, 3)
        assert width <= min(target_pitch, source_pitch)
        self.copied += width * height
        for line in range(height):
            ctypes.memmove(target + line * target_pitch, source + line * source_pitch, width)
        return (OK,)

    def cudaStreamSynchronize(self, stream):
        assert self.recording is None
        return (OK,)

    def cudaStreamBeginCapture(self, stream, mode):
        self.recording = []
        return (OK,)

    def cudaStreamEndCapture(self, stream):
        recorded, self.recording = self.recording, None
        self.captured += 1
        return OK, recorded

    def cudaGraphInstantiate(self, graph, flags):
        return OK, graph

    def cudaGraphDestroy(self, graph):
        return (OK,)

    cudaGraphExecDestroy = cudaGraphDestroy

    def cudaGraphLaunch(self, graph, stream):
        assert stream == STREAM
        self.launched += 1
        for work in graph:
            work()
        return (OK,)


@dataclass
class FakeContext:
    gpu: FakeGpu
    engine: FakeEngine
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    profile: int = 0
    ready_to_capture: bool = False

    def set_optimization_profile_async(self, profile_index, stream_handle):
        self.profile = profile_index
        return stream_handle == STREAM

    def set_input_shape(self, name, shape):
        self.shapes[name] = shape
        self.ready_to_capture = False
        return name != self.gpu.refuse and self.engine.admits(self.profile, name, shape)

    def set_tensor_address(self, name, memory):
        self.addresses[name] = memory
        self.ready_to_capture = False
        return True

    def infer_shapes(self):
        return [name for name in self.engine.types if name not in self.addresses]

    def is_stream_capturable(self, stream):
        return self.ready_to_capture

    def execute_async_v3(self, stream_handle):
        assert stream_handle == STREAM
        feeds = {name: (shape, self.addresses[name]) for name, shape in self.shapes.items()}
        host = {
            name: array(*feeds.pop(name), np.int64).copy() for name in list(feeds) if name == "context_length"
        }
        results = dict(self.addresses)
        if self.gpu.recording is not None:
            self.gpu.recording.append(lambda: self.engine.run(feeds, host, results))
            return self.ready_to_capture
        self.ready_to_capture = True
        self.gpu.executed += 1
        self.engine.run(feeds, host, results)
        return True


def array(shape, address, dtype):
    count = int(np.prod(shape))
    memory = (ctypes.c_ubyte * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


class FakeEngine:
    """The graph in `data`, run by ONNX Runtime; its weights lie in `folder`."""

    def __init__(self, gpu: FakeGpu, data: bytes, folder: Path, target: Target) -> None:
        self.gpu, self.target = gpu, target
        graph = onnx.load_from_string(data).graph
        self.types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
        self.inputs = [value.name for value in graph.input]
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
        self.session = onnxruntime.InferenceSession(data, options)
        self.num_io_tensors = len(self.types)

    def get_tensor_name(self, index):
        # In no order that anyone may count on.
        return sorted(self.types, key=lambda name: name[::-1])[index]

    def get_tensor_dtype(self, name):
        return TRT_NAMES[self.types[name]]

    def admits(self, profile: int, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a shape lies in a profile of this engine, by the target's own account."""
        for graph in self.target.graphs.values():
            if (
                graph.profile == profile
                and set(graph.shapes) == set(self.inputs)
                and name != "context_length"
            ):
                smallest, _, largest = graph.shapes[name]
                return all(
                    low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
                )
        return True

    def create_runtime_config(self):
        return SimpleNamespace(dynamic_shapes_kernel_specialization_strategy="LAZY")

    def create_execution_context(self, runtime_config=None):
        return FakeContext(self.gpu, self)

    def run(self, feeds, host, addresses):
        values = {name: array(*place, NUMPY[self.types[name]]).copy() for name, place in feeds.items()}
        outputs = [name for name in self.types if name not in self.inputs]
        written = {state.output for state in self.target.contract.state if state.form == "scatter"}
        results = self.session.run(outputs, values | host)
        for name, result in zip(outputs, results, strict=True):
            if name in written:
                assert addresses[name] == addresses[name.replace("present", "past_key_values")]
            array(result.shape, addresses[name], NUMPY[self.types[name]])[...] = result


class FakeTensorRT(SimpleNamespace):
    """Stands in for the module `tensorrt_rtx_bindings`."""

    def __init__(self, gpu: FakeGpu, folder: Path, target: Target) -> None:
        names = {name: name for name in ("FLOAT", "HALF", "BF16", "INT64", "INT8", "FP8")}
        super().__init__(
            __version__=target.runtime_version,
            ILogger=type("ILogger", (), {"INTERNAL_ERROR": 0, "ERROR": 1}),
            DataType=SimpleNamespace(**names),
            DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="EAGER"),
        )
        self.loaded = 0

        def deserialize(data):
            self.loaded += 1
            return FakeEngine(gpu, bytes(data), folder, target)

        self.Runtime = lambda log: SimpleNamespace(deserialize_cuda_engine=deserialize)


@pytest.fixture
def open_fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TrtSession, FakeGpu, FakeTensorRT]]:
    """Builds a target whose engines are ONNX graphs, and opens it on a `FakeGpu`."""

    def build_engine(trt, graph, profiles, compute_capabilities):
        return memoryview(graph.model)

    def open_session(bundle: Bundle, **options: Any) -> tuple[TrtSession, FakeGpu, FakeTensorRT]:
        load_tensorrt("tensorrt-rtx")
        monkeypatch.setattr(tensorrt, "build_engine", build_engine)
        target = build_tensorrt(bundle, "tensorrt-rtx", TensorRTOptions(**options))
        gpu = FakeGpu()
        trt = FakeTensorRT(gpu, bundle.path, target)
        return trt_session(bundle)(bundle, trt=trt, cuda_runtime=gpu), gpu, trt

    return open_session


@pytest.fixture(scope="session")
def fake_gpu() -> type[FakeGpu]:
    """The class, for tests of what lies under the session."""
    return FakeGpu
