"""An execution context of a TensorRT engine under one profile: shapes, addresses, steps, and what goes wrong."""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from kvgraph.export.contract import CONTEXT_LENGTH, Contract, GraphName
from kvgraph.runtime.cuda import CapturedGraph, Cuda, DeviceBuffer
from kvgraph.runtime.session import Ids
from kvgraph.runtime.target import Target, TargetGraph
from kvgraph.runtime.tensorrt_api import Engine, ExecutionContext, Runtime, TensorRT
from kvgraph.runtime.tensorrt_module import MessageLog, dtype_names


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, and what its contexts are made with.

    Attributes:
        trt: The module.
        cuda: Device and stream.
        engine: The engine; it must not outlive its runtime.
        log: Where TensorRT's messages go.
        rtx: Whether this is TensorRT-RTX.
    """

    trt: TensorRT
    cuda: Cuda
    engine: Engine
    log: MessageLog
    rtx: bool


def load_engine(
    trt: TensorRT, cuda: Cuda, runtime: Runtime, log: MessageLog, target: Target, name: GraphName
) -> LoadedEngine:
    """The engine of one of a target's graphs, compared with the contract.

    Raises:
        RuntimeError: TensorRT does not deserialize it.
        ValueError: It has other inputs or outputs.
    """
    path = target.graph_path(name)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise RuntimeError(f"{path}: TensorRT does not load it: {_last(log)}")
    _check_engine(trt, engine, str(path), target.graphs[name], target.contract)
    return LoadedEngine(trt, cuda, engine, log, target.name == "tensorrt-rtx")


def _check_engine(trt: TensorRT, engine: Engine, label: str, graph: TargetGraph, contract: Contract) -> None:
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


class EngineContext:
    """An execution context of an engine under one profile, with the device buffers of its small inputs.

    Every tensor is bound by its name. While shapes and addresses stay, a step of a `captured` context is one launch of
    a CUDA graph.

    Args:
        loaded: The engine.
        graph: Its entry in target.json.
        large: Inputs that lie elsewhere.
        captured: Capture steps in CUDA graphs; for steps whose shapes seldom change.

    Raises:
        RuntimeError: There is no context for the profile, as where the device's memory is full.
    """

    def __init__(
        self, loaded: LoadedEngine, graph: TargetGraph, large: Collection[str], *, captured: bool
    ) -> None:
        self._cuda, self._log = loaded.cuda, loaded.log
        self._rtx, self._captured = loaded.rtx, captured
        self._label = f"{graph.file}, profile {graph.profile}"
        self._context = self._create_context(loaded.trt, loaded.engine)
        self.check(
            self._context.set_optimization_profile_async(graph.profile or 0, int(self._cuda.stream)),
            "set the profile",
        )
        self._inputs = {
            # All small inputs are int64.
            name: DeviceBuffer(self._cuda, 8 * math.prod(largest))
            for name, (_, _, largest) in graph.shapes.items()
            if name not in large
        }
        self._recorded: CapturedGraph | None = None

    @property
    def input_names(self) -> frozenset[str]:
        """The small inputs, which `upload` takes."""
        return frozenset(self._inputs)

    def shapes(self, inputs: Mapping[str, Ids]) -> dict[str, tuple[int, ...]]:
        """Those of the small inputs."""
        return {name: inputs[name].shape for name in self._inputs}

    def upload(self, inputs: Mapping[str, Ids]) -> None:
        """Copy the small inputs to the device: contiguous int64 arrays, for every name of `input_names`."""
        for name, buffer in self._inputs.items():
            # The engine reads the bytes as they lie; kvgraph.runtime.checks has seen to both.
            assert inputs[name].dtype == np.int64
            assert inputs[name].flags.c_contiguous
            self._cuda.upload(inputs[name], buffer.address)

    def bind_small(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Tell TensorRT the shapes of the small inputs; what was captured with others is dropped."""
        self._recorded = None
        for name, shape in shapes.items():
            self.bind_input(name, shape, self._inputs[name].address)

    def bind_input(self, name: str, shape: tuple[int, ...], address: int) -> None:
        """Shape and address of an input."""
        self.check(self._context.set_input_shape(name, shape), f"take shape {list(shape)} for {name!r}")
        self.bind_address(name, address)

    def bind_address(self, name: str, address: int) -> None:
        """Address of an input or output."""
        self.check(self._context.set_tensor_address(name, address), f"take an address for {name!r}")

    def finish_binding(self) -> None:
        """Check that nothing is left out.

        Raises:
            RuntimeError: Something is.
        """
        if missing := self._context.infer_shapes():
            raise RuntimeError(f"{self._label}: TensorRT lacks shapes or addresses of {', '.join(missing)}")

    def execute(self) -> None:
        """Queue the step: by the captured graph, or through TensorRT and then capture it for the next."""
        if self._recorded is not None:
            self._recorded.launch()
            return
        # TensorRT puts off work from a change of shapes to the next step, which therefore cannot be captured itself.
        self._enqueue()
        if self._captured and (not self._rtx or self._context.is_stream_capturable(int(self._cuda.stream))):
            self._recorded = self._cuda.capture(self._enqueue)

    def check(self, done: bool, what: str) -> None:
        """Raise RuntimeError with TensorRT's last message where it has not done something."""
        if not done:
            raise RuntimeError(f"{self._label}: TensorRT does not {what}: {_last(self._log)}")

    def _enqueue(self) -> None:
        self.check(self._context.execute_async_v3(int(self._cuda.stream)), "run a step")

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
        self.check(context is not None, "create an execution context")
        assert context is not None
        return context


def _last(log: MessageLog) -> str:
    messages = log.errors()
    return " ".join(messages[-1].split()) if messages else "it gives no reason"
