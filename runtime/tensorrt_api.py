"""The part of TensorRT's Python API that kvgraph uses, as types.

Neither `tensorrt` nor `tensorrt_rtx_bindings` ships type information. A test holds every member of these protocols
against the real bindings: that it exists, and that it takes these arguments.
"""

# ruff: noqa: A002, D102 -- names and meanings are TensorRT's own, see its documentation

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Any, Protocol

Buffer = bytes | memoryview | mmap


class Tensor(Protocol):
    """`ITensor`: an input or output of a network; -1 stands for a dimension that is not fixed."""

    name: str
    dtype: object
    shape: Sequence[int]
    is_shape_tensor: bool


class Layer(Protocol):
    """`ILayer`."""

    name: str
    type: object


class Network(Protocol):
    """`INetworkDefinition`."""

    num_inputs: int
    num_outputs: int
    num_layers: int

    def get_input(self, index: int) -> Tensor: ...
    def get_output(self, index: int) -> Tensor: ...
    def get_layer(self, index: int) -> Layer: ...


class ParserError(Protocol):
    """`ParserError`."""

    def node(self) -> int: ...
    def node_name(self) -> str: ...
    def node_operator(self) -> str: ...
    def desc(self) -> str: ...


class OnnxParser(Protocol):
    """`OnnxParser`; `path` is where the parser looks for external data."""

    num_errors: int

    def parse(self, model: bytes, path: str) -> bool: ...
    def get_error(self, index: int) -> ParserError: ...


class OptimizationProfile(Protocol):
    """`IOptimizationProfile`: false while a shape is missing or impossible."""

    def set_shape(self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]) -> None: ...
    def set_shape_input(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None: ...
    def __bool__(self) -> bool: ...


class BuilderConfig(Protocol):
    """`IBuilderConfig`; compute capabilities can be chosen in TensorRT-RTX alone."""

    num_compute_capabilities: int
    progress_monitor: object

    def set_flag(self, flag: object) -> None: ...
    def set_compute_capability(self, compute_capability: object, index: int) -> bool: ...
    def add_optimization_profile(self, profile: OptimizationProfile) -> int: ...


class Builder(Protocol):
    """`Builder`."""

    def create_network(self, flags: int) -> Network: ...
    def create_builder_config(self) -> BuilderConfig: ...
    def create_optimization_profile(self) -> OptimizationProfile: ...
    def build_serialized_network(self, network: Network, config: BuilderConfig) -> memoryview | None: ...


class ExecutionContext(Protocol):
    """`IExecutionContext`; `is_stream_capturable` is TensorRT-RTX's alone."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...
    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def infer_shapes(self) -> list[str]: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...
    def is_stream_capturable(self, stream: int) -> bool: ...


class RuntimeConfig(Protocol):
    """`IRuntimeConfig`, with what TensorRT-RTX has in it."""

    dynamic_shapes_kernel_specialization_strategy: object


class Engine(Protocol):
    """`ICudaEngine`."""

    num_io_tensors: int

    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_dtype(self, name: str) -> object: ...
    def create_runtime_config(self) -> RuntimeConfig: ...
    def create_execution_context(
        self, runtime_config: RuntimeConfig | None = None
    ) -> ExecutionContext | None: ...


class Runtime(Protocol):
    """`Runtime`."""

    def deserialize_cuda_engine(self, serialized_engine: Buffer) -> Engine | None: ...


class TensorRT(Protocol):
    """The module itself: `tensorrt_rtx_bindings` or `tensorrt`."""

    __version__: str
    # Enumerations and base classes of the bindings, used by name.
    BuilderFlag: Any
    ILogger: Any
    IProgressMonitor: Any
    ComputeCapability: Any
    DataType: Any
    DynamicShapesKernelSpecializationStrategy: Any
    IAttentionInputLayer: Any
    LayerType: Any
    NetworkDefinitionCreationFlag: Any

    def Builder(self, logger: object) -> Builder: ...  # noqa: N802
    def OnnxParser(self, network: Network, logger: object) -> OnnxParser: ...  # noqa: N802
    def Runtime(self, logger: object) -> Runtime: ...  # noqa: N802
