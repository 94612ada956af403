"""One TensorRT engine from one graph, for `tensorrt` and `tensorrt_rtx_bindings` alike.

Every return value is checked. What TensorRT says through its parser or its logger reaches the caller as one message
that names the node and the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvgraph.export.contract import TensorSpec
from kvgraph.export.targets.build_progress import show_progress
from kvgraph.export.targets.profiles import Range
from kvgraph.export.targets.tensorrt_graph import TensorRTGraph
from kvgraph.export.targets.tensorrt_messages import describe_build_error, describe_parse_error
from kvgraph.runtime.tensorrt_api import Builder, BuilderConfig, Network, Tensor, TensorRT
from kvgraph.runtime.tensorrt_module import MessageLog, collect_messages, dtype_names


def build_engine(
    trt: TensorRT,
    graph: TensorRTGraph,
    profiles: Sequence[Mapping[str, Range]],
    compute_capabilities: Sequence[int] | None,
) -> memoryview:
    """The serialized engine.

    Args:
        trt: From `load_tensorrt`.
        graph: From `lower_for_tensorrt`.
        profiles: Input -> shapes, of each optimization profile in order.
        compute_capabilities: 89 for SM89, in TensorRT-RTX; None for the GPU of this machine, in TensorRT.

    Raises:
        RuntimeError: TensorRT does not start, parse or build.
        ValueError: The parsed network's inputs or outputs differ from the contract.
    """
    log = collect_messages(trt)
    failure = partial(_failure, trt, graph, log)
    try:
        builder = trt.Builder(log)
    except TypeError as error:  # the bindings' way to say that the library made no object
        raise failure("does not start on this machine") from error
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    # The network points into weights that the parser owns: it has to live until the engine is built.
    parser = trt.OnnxParser(network, log)
    if not parser.parse(graph.model, str(graph.path)):
        raise failure("does not parse the graph", describe_parse_error(parser, log))
    check_interface(trt, network, graph)
    allow_decomposition(trt, network)

    config = builder.create_builder_config()
    if compute_capabilities is not None and not _target(trt, config, compute_capabilities):
        raise failure("does not build for these compute capabilities")
    for shapes in profiles:
        if not _add_profile(builder, config, network, shapes):
            raise failure("does not take the optimization profile")
    with show_progress(trt, config, graph.path.name):
        engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise failure("does not build the graph")
    return memoryview(engine)


def _failure(
    trt: TensorRT, graph: TensorRTGraph, log: MessageLog, what: str, cause: str | None = None
) -> RuntimeError:
    cause = cause or describe_build_error(log, graph.operators)
    return RuntimeError(f"{graph.path}: TensorRT {trt.__version__} {what}: {cause}")


def allow_decomposition(trt: TensorRT, network: Network) -> None:
    """Let TensorRT take every attention apart where it has no fused kernel; costs nothing where it has one."""
    for index in range(network.num_layers):
        layer: Any = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            # The bindings hand out the base class, which hides the attention that the layer belongs to.
            layer.__class__ = trt.IAttentionInputLayer
            layer.attention.decomposable = True


def check_interface(trt: TensorRT, network: Network, graph: TensorRTGraph) -> None:
    """Compare the network's inputs and outputs with the contract: by name, then dtype and shape of each.

    Raises:
        ValueError: They differ.
    """
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    outputs = [network.get_output(index) for index in range(network.num_outputs)]
    _check_tensors(trt, f"{graph.path.name}: input", inputs, graph.inputs)
    _check_tensors(trt, f"{graph.path.name}: output", outputs, graph.outputs)


def _check_tensors(
    trt: TensorRT, label: str, found: Sequence[Tensor], expected: Sequence[TensorSpec]
) -> None:
    by_name = {tensor.name: tensor for tensor in found}
    wanted = {tensor.name for tensor in expected}
    if by_name.keys() != wanted:
        different = sorted(by_name.keys() ^ wanted)
        raise ValueError(
            f"{label}s of the TensorRT network and of the contract differ in {', '.join(different[:4])}; "
            "export the bundle again"
        )
    names = dtype_names(trt)
    for spec in expected:
        tensor = by_name[spec.name]
        shape = tuple(dim if isinstance(dim, int) else -1 for dim in spec.shape)
        if (dtype := names.get(tensor.dtype)) != spec.dtype:
            raise ValueError(
                f"{label} {spec.name!r} is {dtype or tensor.dtype} in TensorRT, contract says {spec.dtype}"
            )
        if not _fits(tuple(tensor.shape), shape):
            raise ValueError(
                f"{label} {spec.name!r} has shape {list(tensor.shape)} in TensorRT, contract says {list(spec.shape)}"
            )


def _fits(found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether shapes agree; TensorRT may leave open (-1) what it cannot infer, never the other way round."""
    return len(found) == len(expected) and all(
        size in (wanted, -1) for size, wanted in zip(found, expected, strict=True)
    )


def _target(trt: TensorRT, config: BuilderConfig, compute_capabilities: Sequence[int]) -> bool:
    # Else TensorRT-RTX may allocate while it runs, and its work cannot be captured in a CUDA graph.
    config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    config.num_compute_capabilities = len(compute_capabilities)
    members = [getattr(trt.ComputeCapability, f"SM{capability}") for capability in compute_capabilities]
    return all(config.set_compute_capability(member, index) for index, member in enumerate(members))


def _add_profile(
    builder: Builder, config: BuilderConfig, network: Network, shapes: Mapping[str, Range]
) -> bool:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        set_range = profile.set_shape_input if tensor.is_shape_tensor else profile.set_shape
        set_range(tensor.name, *shapes[tensor.name])
    return bool(profile) and config.add_optimization_profile(profile) >= 0
