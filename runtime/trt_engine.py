"""One graph of a TensorRT target: an engine under one of its profiles, bound to a cache by name."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kvgraph.export.contract import CONTEXT_LENGTH, LOGIT_POSITIONS, LOGITS, Contract
from kvgraph.runtime.cuda import CapturedGraph, Cuda, DeviceBuffer, pinned_array
from kvgraph.runtime.session import Floats, Ids
from kvgraph.runtime.target import TargetGraph
from kvgraph.runtime.tensorrt_api import Engine, ExecutionContext, Runtime, TensorRT
from kvgraph.runtime.tensorrt_module import MessageLog, dtype_names
from kvgraph.runtime.trt_cache import TrtCache


def load_engine(runtime: Runtime, path: Path, log: MessageLog) -> Engine:
    """The engine of a file; it must not outlive the runtime.

    Raises:
        RuntimeError: TensorRT does not deserialize it.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise RuntimeError(f"{path}: TensorRT does not load it: {_last(log)}")
    return engine


def check_engine(trt: TensorRT, engine: Engine, label: str, graph: TargetGraph, contract: Contract) -> None:
    """Compare an engine's inputs and outputs with the contract: names, and the dtype of each.

    Raises:
        ValueError: They differ.
    """
    spec = contract.graph(graph.source)
    expected = {tensor.name: tensor.dtype for tensor in (*spec.inputs, *spec.outputs)}
    if CONTEXT_LENGTH in graph.shapes:
        expected[CONTEXT_LENGTH] = "int64"
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    if set(names) != expected.keys():
        different = sorted(set(names) ^ expected.keys())
        raise ValueError(
            f"{label}: engine and contract differ in {', '.join(different[:4])}; build the target again"
        )
    known = dtype_names(trt)
    for name in names:
        if (dtype := known.get(engine.get_tensor_dtype(name))) != expected[name]:
            raise ValueError(
                f"{label}: {name!r} is {dtype} in the engine, contract says {expected[name]}; build again"
            )


class EngineGraph:
    """An execution context of an engine under one profile, with the buffers of its small inputs and its logits.

    Every tensor is bound by its name. The cache is bound once as `past_key_values.*` and `present.*`, one address for
    both: the engine updates it in place. Shapes and addresses are told to TensorRT only when they change; while they
    stay, a step of a `captured` graph is one launch of a CUDA graph.

    Args:
        trt: The module.
        cuda: Device and stream.
        engine: From `load_engine`.
        graph: Its entry in target.json.
        contract: The target's contract.
        log: Where TensorRT's messages go.
        rtx: Whether this is TensorRT-RTX.
        captured: Capture steps in CUDA graphs; for steps whose shapes seldom change.

    Raises:
        RuntimeError: There is no context for the profile, as where the device's memory is full.
    """

    def __init__(
        self,
        trt: TensorRT,
        cuda: Cuda,
        engine: Engine,
        graph: TargetGraph,
        contract: Contract,
        log: MessageLog,
        *,
        rtx: bool,
        captured: bool,
    ) -> None:
        self._cuda, self._contract, self._log = cuda, contract, log
        self._rtx, self._captured = rtx, captured
        self._label = f"{graph.file}, profile {graph.profile}"
        self._context = self._create_context(trt, engine)
        self._check(
            self._context.set_optimization_profile_async(graph.profile or 0, int(cuda.stream)),
            "set the profile",
        )
        states = {tensor.name for tensor in contract.state}
        self._inputs = {
            # All small inputs are int64.
            name: DeviceBuffer(cuda, 8 * math.prod(largest))
            for name, (_, _, largest) in graph.shapes.items()
            if name not in states and name != CONTEXT_LENGTH
        }
        # A shape input is read from host memory, when work is queued.
        self._context_length = np.zeros(1, np.int64) if CONTEXT_LENGTH in graph.shapes else None
        self._device_logits: DeviceBuffer | None = None
        self._logits: Floats | None = None
        self._bound: tuple[weakref.ref[TrtCache], dict[str, tuple[int, ...]], int] | None = None
        self._recorded: CapturedGraph | None = None

    @property
    def input_names(self) -> frozenset[str]:
        """The small inputs that `run` has to be given."""
        return frozenset(self._inputs)

    def run(self, cache: TrtCache, inputs: Mapping[str, Ids], context_length: int) -> Floats:
        """Logits [B, N, V] of one step, in an array that the next step may write again.

        Args:
            cache: Read and updated in place.
            inputs: Name -> contiguous int64 array, for every name of `input_names`.
            context_length: Slots that attention reads, at least those in use.

        Raises:
            RuntimeError: TensorRT or CUDA fails.
        """
        shapes = {name: inputs[name].shape for name in self._inputs}
        bound = self._bound
        if bound is None or bound[0]() is not cache or bound[1:] != (shapes, context_length):
            self._bind(cache, shapes, context_length)
        for name, buffer in self._inputs.items():
            # The engine reads the bytes as they lie; kvgraph.runtime.checks has seen to both.
            assert inputs[name].dtype == np.int64
            assert inputs[name].flags.c_contiguous
            self._cuda.upload(inputs[name], buffer.address)
        self._execute()
        assert self._device_logits is not None  # _bind made both
        assert self._logits is not None
        self._cuda.download(self._device_logits.address, self._logits)
        self._cuda.synchronize()
        return self._logits

    def _bind(self, cache: TrtCache, shapes: dict[str, tuple[int, ...]], context_length: int) -> None:
        """Tell TensorRT the shapes and addresses of a step; what was captured for others is dropped."""
        self._bound, self._recorded = None, None
        for name, shape in shapes.items():
            self._bind_input(name, shape, self._inputs[name].address)
        for tensor in self._contract.state:
            self._bind_input(tensor.name, cache.shape(tensor), cache.address(tensor.name))
            self._bind_address(tensor.output, cache.address(tensor.name))
        if self._context_length is not None:
            self._context_length[0] = context_length
            self._bind_input(CONTEXT_LENGTH, (1,), self._context_length.ctypes.data)
        batch_size, rows = cache.batch_size, shapes.get(LOGIT_POSITIONS, (0, 1))[1]
        logits_shape = (batch_size, rows, self._contract.vocab_size)
        if self._logits is None or self._logits.shape != logits_shape:
            self._logits = pinned_array(self._cuda, logits_shape, np.float32)
            self._device_logits = DeviceBuffer(self._cuda, self._logits.nbytes)
        assert self._device_logits is not None
        self._bind_address(LOGITS, self._device_logits.address)
        if missing := self._context.infer_shapes():
            raise RuntimeError(f"{self._label}: TensorRT lacks shapes or addresses of {', '.join(missing)}")
        self._bound = (weakref.ref(cache), shapes, context_length)

    def _bind_input(self, name: str, shape: tuple[int, ...], address: int) -> None:
        self._check(self._context.set_input_shape(name, shape), f"take shape {list(shape)} for {name!r}")
        self._bind_address(name, address)

    def _bind_address(self, name: str, address: int) -> None:
        self._check(self._context.set_tensor_address(name, address), f"take an address for {name!r}")

    def _execute(self) -> None:
        """Queue the step: by the captured graph, or through TensorRT and then capture it for the next."""
        if self._recorded is not None:
            self._recorded.launch()
            return
        # TensorRT puts off work from a change of shapes to the next step, which therefore cannot be captured itself.
        self._enqueue()
        if self._captured and (not self._rtx or self._context.is_stream_capturable(int(self._cuda.stream))):
            self._recorded = self._cuda.capture(self._enqueue)

    def _enqueue(self) -> None:
        self._check(self._context.execute_async_v3(int(self._cuda.stream)), "run a step")

    def _create_context(self, trt: TensorRT, engine: Engine) -> ExecutionContext:
        if self._rtx and self._captured:
            config = engine.create_runtime_config()
            # By default a new shape runs on slow kernels until better ones are compiled: a graph would keep the slow.
            config.dynamic_shapes_kernel_specialization_strategy = (
                trt.DynamicShapesKernelSpecializationStrategy.EAGER
            )
            context = engine.create_execution_context(config)
        else:
            context = engine.create_execution_context()
        self._check(context is not None, "create an execution context")
        assert context is not None
        return context

    def _check(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"{self._label}: TensorRT does not {what}: {_last(self._log)}")


def _last(log: MessageLog) -> str:
    messages = log.errors()
    return " ".join(messages[-1].split()) if messages else "it gives no reason"
