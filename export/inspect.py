"""`kvgraph inspect`: what a checkpoint, a bare config.json or a bundle holds, without running or reading weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from kvgraph.export.bundle import BUNDLE_FILE
from kvgraph.export.contract import Contract, Dim, GraphName, TensorSpec
from kvgraph.export.weight_kinds import (
    PartSize,
    WeightKind,
    layer_pattern,
    tensor_bytes,
)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Memory of the key/value cache.

    Attributes:
        dtypes: Element types of the buffers.
        bytes_per_token: Bytes of one slot of one row, over all layers.
        batch_size: Rows.
        context: Slots a row.
        nbytes: Bytes of so many rows and slots.
        bytes_per_source_token: Bytes of what the decoder reads of a source's token; 0 without an encoder.
    """

    dtypes: tuple[str, ...]
    bytes_per_token: int
    batch_size: int
    context: int
    nbytes: int
    bytes_per_source_token: int = 0


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Inputs or outputs of a graph that differ in nothing but their layer.

    Attributes:
        graph: "prefill", "decode" or "encode".
        direction: "in" or "out".
        name: Their common name, "{i}" for the layer.
        dtype: Of each.
        shape: Of each; letters are symbolic.
        count: How many there are.
    """

    graph: GraphName
    direction: Literal["in", "out"]
    name: str
    dtype: str
    shape: tuple[Dim, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Operators:
    """What a graph is made of.

    Attributes:
        opset: Version of the standard operators.
        counts: Operator -> nodes, most frequent first; other domains as "domain::Operator".
    """

    opset: int
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BuiltTarget:
    """What `kvgraph build` made of a bundle.

    Attributes:
        name: Its folder in targets/.
        current: Whether it was built from the bundle as it is now.
        description: target.json.
        files: Name -> bytes.
    """

    name: str
    current: bool
    description: Mapping[str, Any]
    files: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that can be said of a model without running it.

    Attributes:
        kind: "bundle", "checkpoint", or "config" where no weights were looked at.
        path: What was inspected.
        model_type: Its family.
        dtype: Element type of activations and cache: the bundle's, or what an export would give it.
        config: `ModelConfig.to_json()`.
        parts: Parameters by part of the model.
        weights: Every kind of weight.
        tied_head: Whether the head is the embedding table, counted there alone.
        cache: Memory of the cache.
        contract: Inputs and outputs of every graph; of a checkpoint, those that an export gives.
        operators: Graph -> operators; None without graphs, or where onnx is not installed.
        files: Name -> bytes.
        targets: What has been built from a bundle.
        recipe: A bundle's quantization recipe.
        source: Where the model comes from.
        versions: What made a bundle.
        standalone: Name of the target that a bundle holds alone: `operators` are those of its ONNX files then.
    """

    kind: Literal["bundle", "checkpoint", "config"]
    path: str
    model_type: str
    dtype: str
    config: Mapping[str, Any]
    parts: tuple[PartSize, ...]
    weights: tuple[WeightKind, ...]
    tied_head: bool
    cache: CacheSize
    contract: tuple[TensorGroup, ...]
    operators: Mapping[GraphName, Operators] | None
    files: Mapping[str, int]
    targets: tuple[BuiltTarget, ...]
    recipe: Mapping[str, Any] | None
    source: Mapping[str, Any]
    versions: Mapping[str, str]
    standalone: str | None = None

    @property
    def parameters(self) -> int:
        """Elements of all weights; a tied table counts once."""
        return sum(part.parameters for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.nbytes for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        return {"parameters": self.parameters, "nbytes": self.nbytes, **asdict(self)}


def inspect(
    source: str | Path,
    *,
    batch_size: int = 1,
    context: int | None = None,
    dtype: str | None = None,
    revision: str | None = None,
) -> Inspection:
    """Look into a bundle, a checkpoint or a config.json.

    Args:
        source: A bundle's directory, or what `open_checkpoint` takes.
        batch_size: Rows to size the cache for.
        context: Slots a row to size the cache for; default: all that the model allows.
        dtype: Element type that a checkpoint would be exported in; default: the checkpoint's own.
        revision: Branch, tag or commit of a hub checkpoint.

    Raises:
        ValueError: An argument is out of its range or does not fit `source`, or `source` is damaged.
        OSError: `source` cannot be read.
    """
    if (Path(source) / BUNDLE_FILE).is_file():
        from kvgraph.export.inspect_bundle import inspect_bundle

        for option, value in (("dtype", dtype), ("revision", revision)):
            if value is not None:
                raise ValueError(f"{option} is for checkpoints, but {source} is a bundle; leave it out")
        return inspect_bundle(Path(source), batch_size, context)
    # Needs torch, which bundles do not.
    from kvgraph.export.inspect_checkpoint import inspect_checkpoint

    return inspect_checkpoint(source, batch_size, context, dtype, revision)


def size_cache(contract: Contract, batch_size: int, context: int | None) -> CacheSize:
    """Memory of the cache that a contract asks for.

    Raises:
        ValueError: `batch_size` or `context` is out of its range.
    """
    most = contract.capacity or contract.max_positions
    context = most if context is None else context
    if batch_size < 1:
        raise ValueError(f"batch is {batch_size}, expected 1 or more")
    if not 1 <= context <= most:
        raise ValueError(f"context is {context}, expected 1 to {most}, the positions that the model allows")
    bytes_per_token = 0
    for tensor in contract.state:
        _, heads, _, head_dim = tensor.shape
        bytes_per_token += tensor_bytes(tensor.dtype, int(heads) * int(head_dim))
    dtypes = tuple(dict.fromkeys(tensor.dtype for tensor in contract.state))
    total = bytes_per_token * batch_size * context
    return CacheSize(dtypes, bytes_per_token, batch_size, context, total, _source_bytes(contract))


def _source_bytes(contract: Contract) -> int:
    """Bytes of all cross tensors of one token of one source."""
    if contract.encoder is None:
        return 0
    sizes = [(tensor.dtype, int(tensor.shape[1]) * int(tensor.shape[3])) for tensor in contract.encoder.cross]
    return sum(tensor_bytes(dtype, elements) for dtype, elements in sizes)


def group_contract(contract: Contract) -> tuple[TensorGroup, ...]:
    """Inputs and outputs of every graph, one line for all layers."""
    groups: list[TensorGroup] = []
    for graph in contract.graphs:
        spec = contract.graph(graph)
        groups += _group(graph, "in", spec.inputs)
        groups += _group(graph, "out", spec.outputs)
    return tuple(groups)


def _group(
    graph: GraphName, direction: Literal["in", "out"], tensors: Iterable[TensorSpec]
) -> list[TensorGroup]:
    counts: dict[tuple[str, str, tuple[Dim, ...]], int] = {}
    for tensor in tensors:
        key = (layer_pattern(tensor.name), tensor.dtype, tensor.shape)
        counts[key] = counts.get(key, 0) + 1
    return [TensorGroup(graph, direction, *key, count) for key, count in counts.items()]
