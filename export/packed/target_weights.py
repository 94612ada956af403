"""The weights file of a target: packed weights, and whatever else its graphs read, each once.

It is a safetensors file of bytes. Every tensor starts on a multiple of 64 bytes, which is what the kernels' loads and
ONNX Runtime's mapping ask for, and is padded to one; the graphs know its exact length, type and shape. Tensors lie in
the order in which the graphs read them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from kvgraph.export.packed.packed_weight import PackedWeight, Storage
from kvgraph.export.packed.stacked_weight import StackedWeight
from kvgraph.export.packed.stored_matrix import mapped_bytes
from kvgraph.export.passes.packed_operators import content_of, weight_prefix
from kvgraph.export.weights_file import WEIGHTS_FILE, StoredTensor, WeightLayout, write_weights

_ALIGNMENT = 64
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class _Content:
    """What a tensor of the file holds.

    Attributes:
        name: In the file and in the graphs.
        size: Bytes without the padding.
        source: A weight to pack, or a tensor of the bundle that is copied.
        storage: How a weight is packed.
    """

    name: str
    size: int
    source: PackedWeight | StackedWeight | ir.ExternalTensor
    storage: Storage | None = None


class TargetWeights:
    """The weights of one or more lowered graphs.

    Args:
        models: Graphs whose packed weights have no content yet, and whose other external data are the bundle's.
    """

    def __init__(self, models: Sequence[ir.Model]) -> None:
        self._contents: dict[object, _Content] = {}
        # Graph -> keys of what it reads.
        self._read: list[set[object]] = []
        for model in models:
            self._read.append({self._add(value) for value in _weights(model)})
        self._layout = _plan(list(self._contents.values()))
        self._models = models

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes that each graph reads."""
        return tuple(sum(self._contents[key].size for key in keys) for keys in self._read)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(content.size for content in self._contents.values())

    def place(self) -> None:
        """Let the graphs read the file's tensors, and say in their nodes how weights are packed."""
        for model in self._models:
            for value in _weights(model):
                self._place(model.graph, value)

    def write(self, path: Path) -> str:
        """Write the file, a tensor at a time, and give its sha256."""
        tensors = (
            (content.name, _padded(_pieces(content), content.size)) for content in self._contents.values()
        )
        return write_weights(path, self._layout, tensors)

    def _add(self, value: ir.Value) -> object:
        key = _key(value)
        if key in self._contents:
            return key
        name, weight = f"{value.name}", content_of(value)
        taken = {content.name for content in self._contents.values()}
        while name in taken:
            name += "'"
        if weight is None:
            tensor = value.const_value
            assert isinstance(tensor, ir.ExternalTensor)
            assert tensor.length is not None
            self._contents[key] = _Content(name, tensor.length, tensor)
        else:
            storage = weight.storage()
            self._contents[key] = _Content(name, weight.size(storage), weight, storage)
        return key

    def _place(self, graph: ir.Graph, value: ir.Value) -> None:
        content = self._contents[_key(value)]
        stored, source = self._layout.tensors[content.name], content.source
        if content.storage is not None:
            for use in value.uses():
                prefix, storage = weight_prefix(use.node, use.idx), content.storage
                said = {f"{prefix}format": storage.format, f"{prefix}scale_format": storage.scale_format}
                use.node.attributes.update({key: ir.AttrString(key, text) for key, text in said.items()})
        dtype, shape = ir.DataType.UINT8, ir.Shape([content.size])
        if isinstance(source, ir.ExternalTensor):
            dtype, shape = source.dtype, ir.Shape(source.shape)
        if value.name is not None and graph.initializers.get(value.name) is value:
            del graph.initializers[value.name]
        if content.name in graph.initializers:
            value.replace_all_uses_with(graph.initializers[content.name])
            return
        tensor = ir.ExternalTensor(
            WEIGHTS_FILE, stored.offset, content.size, dtype, shape=shape, name=content.name
        )
        value.name, value.shape, value.const_value = content.name, shape, tensor
        graph.register_initializer(value)


def _weights(model: ir.Model) -> list[ir.Value]:
    """What a graph reads that has to be in the file, in order."""
    found: dict[ir.Value, None] = {}
    for node in model.graph:
        for value in node.inputs:
            external = value is not None and isinstance(value.const_value, ir.ExternalTensor)
            if value is not None and (external or content_of(value) is not None):
                found[value] = None
    return list(found)


def _key(value: ir.Value) -> object:
    """What values with the same content have in common."""
    weight = content_of(value)
    if weight is None:
        assert value.const_value is not None
        return (_origin(value.const_value), value.dtype)
    if isinstance(weight, StackedWeight):
        return tuple(_weight_key(expert) for expert in weight.experts)
    return _weight_key(weight)


def _weight_key(weight: PackedWeight) -> object:
    return (weight.gated, tuple((_origin(part.codes), part.transposed) for part in weight.parts))


def _origin(tensor: ir.TensorProtocol) -> object:
    """Where the bytes of a tensor lie in the bundle's file."""
    if isinstance(tensor, ir.ExternalTensor):
        return (tensor.offset, tensor.length)
    # A constant of one graph.
    return id(tensor)


def _plan(contents: Sequence[_Content]) -> WeightLayout:
    # What a session reads into memory of its own, and how long it is without its padding.
    packed = {content.name: str(content.size) for content in contents if content.storage is not None}
    entries: dict[str, object] = {"__metadata__": packed}
    tensors, end = [], 0
    for content in contents:
        size = content.size + -content.size % _ALIGNMENT
        entries[content.name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        tensors.append((content.name, end, size))
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    places = {
        name: StoredTensor(name, "uint8", (size,), len(header) + start, size) for name, start, size in tensors
    }
    return WeightLayout(header, places, len(header) + end)


def _pieces(content: _Content) -> Iterator[memoryview]:
    source = content.source
    if not isinstance(source, ir.ExternalTensor):
        assert content.storage is not None
        for octets in source.pieces(content.storage):
            yield octets.data
        return
    with mapped_bytes(source) as data:
        for start in range(0, content.size, _PIECE_BYTES):
            yield np.array(data[start : start + _PIECE_BYTES]).data


def _padded(pieces: Iterator[memoryview], size: int) -> Iterator[memoryview]:
    yield from pieces
    if missing := -size % _ALIGNMENT:
        yield memoryview(bytes(missing))
