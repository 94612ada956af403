"""`kvgraph export`: a checkpoint to a canonical bundle."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import Tensor
from tqdm import tqdm

import kvgraph
from kvgraph.export.architecture import (
    TracedGraph,
    assemble_graph,
    graph_constants,
    model_contract,
    trace_graph,
)
from kvgraph.export.bundle import BUNDLE_FILE, SCHEMA_VERSION, TARGETS, Bundle, FileEntry, hash_file
from kvgraph.export.collector import without_collecting
from kvgraph.export.contract import GRAPHS, Contract, GraphName, graph_file, hidden_state
from kvgraph.export.end_tokens import check_end_tokens
from kvgraph.export.parameter_rows import ParameterRows
from kvgraph.export.passes.bind_capacity import bind_capacity
from kvgraph.export.trace import fake_model
from kvgraph.export.weight_bytes import as_bytes, check_tied, one_thread
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightLayout, plan_layout, write_weights
from kvgraph.export.writer import write_description, writing_directory
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.models.config import DTYPES, ModelConfig
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import WeightPlan, plan_weights
from kvgraph.models.weights import WeightStream

_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What an export may be asked for.

    Attributes:
        dtype: Type of weights, activations and cache; None takes the checkpoint's.
        residual_dtype: Type of the residual stream; None is `dtype`.
        capacity: T as a number written into the graphs; None leaves it symbolic.
        weights: Whether to write the weights; without them a bare config.json is enough.
        debug_outputs: Make the residual stream before each layer and after the last a graph output.
    """

    dtype: str | None = None
    residual_dtype: str | None = None
    capacity: int | None = None
    weights: bool = True
    debug_outputs: bool = False


@dataclass(frozen=True, slots=True)
class TracedModel:
    """Everything that tracing learns, before a weight is read."""

    contract: Contract
    graphs: Mapping[GraphName, TracedGraph]
    constants: Mapping[str, Tensor]
    parameters: Mapping[str, tuple[str, tuple[int, ...]]]
    weights: WeightPlan


@dataclass(frozen=True, slots=True)
class ExportedGraphs:
    """Graphs on the disk.

    Attributes:
        traced: What they were made from.
        layout: The weights file that they read.
        dtype: Type of weights, activations and cache.
        residual_dtype: Type of the residual stream.
    """

    traced: TracedModel
    layout: WeightLayout
    dtype: str
    residual_dtype: str


def export_checkpoint(
    checkpoint: Checkpoint, output: str | Path, options: ExportOptions | None = None, *, force: bool = False
) -> Bundle:
    """Trace a checkpoint and write its bundle; nothing is left behind where that fails.

    Args:
        checkpoint: From `open_checkpoint`.
        output: The bundle's directory.
        options: See `ExportOptions`.
        force: Replace a bundle that is there.

    Raises:
        ValueError: The checkpoint or an option is wrong; the message says what and how to mend it.
        FileExistsError: `output` exists and `force` is off.
    """
    options = options or ExportOptions()
    with writing_directory(output, BUNDLE_FILE, force, (TARGETS,)) as directory:
        stream = checkpoint.weights() if options.weights else None
        graphs = export_graphs(directory, checkpoint, options, stream)
        hashes = {}
        if stream is not None:
            path = directory / WEIGHTS_FILE
            hashes[WEIGHTS_FILE] = _write_weights(path, stream, graphs.traced, graphs.layout)
        _check_graphs(directory, graphs.traced.contract.graphs, graphs.layout)
        bundle = describe_bundle(directory, checkpoint, graphs, hashes, stream is not None)
        write_description(bundle)
    return Bundle.open(output)


def export_graphs(
    directory: Path, checkpoint: Checkpoint, options: ExportOptions, stream: WeightStream | None
) -> ExportedGraphs:
    """Write a bundle's graphs and its tokenizer; the weights that the graphs read are for the caller to write.

    Args:
        directory: Where to.
        checkpoint: From `open_checkpoint`.
        options: See `ExportOptions`.
        stream: The weights, to be checked against the model; None where there are none.

    Raises:
        ValueError: The checkpoint or an option is wrong.
    """
    config = checkpoint.config
    dtype = _known_dtype(options.dtype or checkpoint.dtype(), "dtype")
    residual_dtype = _known_dtype(options.residual_dtype or dtype, "residual_dtype")
    _check_capacity(options.capacity, config)
    check_end_tokens(checkpoint)
    # What can be refused at once comes first.
    checkpoint.write_tokenizer(directory)
    precision = Precision(getattr(torch, dtype), getattr(torch, residual_dtype))
    traced = trace_model(config, precision, options.capacity, stream)
    layout = plan_layout(traced.parameters)
    _write_graphs(directory, traced, layout, options.debug_outputs)
    return ExportedGraphs(traced, layout, dtype, residual_dtype)


def trace_model(
    config: ModelConfig,
    precision: Precision,
    capacity: int | None,
    stream: WeightStream | None,
) -> TracedModel:
    """Trace every graph; where there is a checkpoint, it is checked against the model first."""
    with fake_model(config, precision) as model:
        weights = plan_weights(family(config.model_type), model, stream.names if stream else ())
    if stream is not None:
        # Outside of the fake tensors, among which what is read would have no values.
        stream.check(weights.shapes, weights.ignorable)
        check_tied(stream, weights)
    with without_collecting(), fake_model(config, precision) as model:
        contract = model_contract(model, capacity)
        graphs = {graph: trace_graph(model, graph) for graph in _progress(contract.graphs, "tracing")}
        parameters = {
            name: (str(weight.dtype).removeprefix("torch."), tuple(weight.shape))
            for name, weight in model.weights().items()
        }
    # Outside of the trace, where tensors have values.
    return TracedModel(contract, graphs, graph_constants(model), parameters, weights)


def _known_dtype(name: str, option: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"{option} is {name!r}, expected one of {', '.join(DTYPES)}")
    return name


def _check_capacity(capacity: int | None, config: ModelConfig) -> None:
    if capacity is not None and not 2 <= capacity <= config.max_positions:
        raise ValueError(
            f"capacity is {capacity}, expected 2 to {config.max_positions}, the positions of the model"
        )


def _write_graphs(directory: Path, traced: TracedModel, layout: WeightLayout, debug_outputs: bool) -> None:
    constants = {name: ir.tensor(value.numpy(), name=name) for name, value in traced.constants.items()}
    for graph in traced.contract.graphs:
        model = assemble_graph(traced.graphs[graph], graph, traced.contract, layout, constants)
        if graph in GRAPHS and (capacity := traced.contract.capacity) is not None:
            bind_capacity(model, traced.contract, capacity)
        if graph in GRAPHS and debug_outputs:
            expose_hidden_states(model, traced.contract.num_layers)
        (directory / graph_file(graph)).write_bytes(ir.to_proto(model).SerializeToString())


def expose_hidden_states(model: ir.Model, num_layers: int) -> None:
    """Make the residual stream before each layer and after the last an output of the graph."""
    values = {value.name: value for node in model.graph for value in node.outputs}
    model.graph.outputs.extend(values[hidden_state(layer)] for layer in range(num_layers + 1))


def _write_weights(path: Path, stream: WeightStream, traced: TracedModel, layout: WeightLayout) -> str:
    def tensors() -> Iterator[tuple[str, Iterator[memoryview]]]:
        with tqdm(total=layout.size, desc="weights", unit="B", unit_scale=True, disable=None) as bar:
            for name, stored in layout.tensors.items():
                yield name, as_bytes(rows.pieces(name, getattr(torch, stored.dtype)))
                bar.update(stored.size)

    rows = ParameterRows(stream, traced.weights.sources)
    with one_thread():
        return write_weights(path, layout, tensors())


def _check_graphs(directory: Path, graphs: Sequence[GraphName], layout: WeightLayout) -> None:
    """The ONNX checker with full shape inference, external data included.

    Where no weights were written, a sparse file of their size stands in while the checker looks.
    """
    weights = directory / WEIGHTS_FILE
    stand_in = not weights.exists()
    if stand_in:
        weights.touch()
        os.truncate(weights, layout.size)
    for graph in graphs:
        onnx.checker.check_model(str(directory / graph_file(graph)), full_check=True)
    if stand_in:
        weights.unlink()


def describe_bundle(
    directory: Path,
    checkpoint: Checkpoint,
    graphs: ExportedGraphs,
    hashes: Mapping[str, str],
    weights: bool,
) -> Bundle:
    """bundle.json of a filled directory.

    Args:
        directory: Where its files are.
        checkpoint: What it was made from.
        graphs: From `export_graphs`.
        hashes: Those of files that are known from writing.
        weights: Whether it has the checkpoint's weights.
    """
    config, traced = checkpoint.config, graphs.traced
    described = {
        name: {
            "dtype": stored_dtype,
            "shape": list(shape),
            "source": list(traced.weights.sources[name].names),
            "transposed": traced.weights.sources[name].transpose,
        }
        for name, (stored_dtype, shape) in traced.parameters.items()
    }
    files = {
        file.name: FileEntry(file.stat().st_size, hashes.get(file.name) or hash_file(file))
        for file in sorted(directory.iterdir())
        if not file.name.startswith(".")
    }
    return Bundle(
        path=directory,
        schema_version=SCHEMA_VERSION,
        tool_version=kvgraph.__version__,
        model_type=config.model_type,
        config=config.to_json(),
        dtype=graphs.dtype,
        residual_dtype=graphs.residual_dtype,
        contract=traced.contract,
        recipe=None,
        source={**asdict(checkpoint.source), "digest": checkpoint.digest(weights=weights)},
        weights=described,
        files=files,
        versions={package: version(package) for package in _PACKAGES},
    )


def _progress(graphs: Sequence[GraphName], description: str) -> Iterator[GraphName]:
    yield from tqdm(graphs, desc=description, unit="graph", disable=None)
