"""Weights in the layout of kvgraph's CPU kernels, made from canonical tensors a few columns at a time.

A matrix [K, N] is cut into panels of 16 columns, the last of them filled up with columns of zeros. Blocks have 32
inputs, the last one filled up with zeros; floats know no blocks. What a panel holds:

| format | content |
|---|---|
| float32, float16, bfloat16 | [K][16] elements |
| int8 | 16 float32 scales, then 512 bytes a block |
| int8-block | for each block 16 float32 scales and 512 bytes |
| int4 | for each block 16 scales and 256 bytes; codes are stored 8 higher, from 0 |
| uint4 | for each block 16 scales, 16 uint8 zero points and 256 bytes |

The order of codes within a block is that of `panels.int8_panels` and `panels.int4_panels`. The scales of 4-bit codes
are float16 where that is exact for every scale of the weight, float32 otherwise. Float32 matrices are stored in 16 bits
where that is exact for every value: a float32 bundle of a bfloat16 checkpoint takes half the memory, and gives the same
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.in_order import map_in_order
from kvgraph.export.packed.panels import (
    BLOCK,
    PANEL,
    block_count,
    by_block,
    float_panels,
    int4_panels,
    int8_panels,
    panel_count,
)
from kvgraph.export.packed.stored_matrix import Kind, MatrixReader, StoredMatrix
from kvgraph.runtime.kernels.weights import compiled, pack_panels

FLOATS: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": ir.DataType.BFLOAT16.numpy(),
}

# Elements that are packed at a time. Measured: what is larger than the memory that an allocator keeps is ten times as
# slow, for every page of it is made anew.
_SLAB_ELEMENTS = 256 << 10
# Of integers in C++, which makes no array but the panels. Measured: a quarter of this takes half as much time again,
# for rows of a matrix are then read in short pieces.
_COMPILED_ELEMENTS = 1 << 20
# Elements of a weight that are in memory at once, mapped.
_MAPPED_ELEMENTS = 16 << 20


# A matrix, and which of its columns.
_Span = tuple[MatrixReader, int, int]


@dataclass(frozen=True, slots=True)
class Storage:
    """How the values of a packed weight are stored.

    Attributes:
        format: The format of the module's table.
        scale_format: "float16" or "float32" for 4-bit codes, "" for others.
    """

    format: str
    scale_format: str


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One or more matrices that are multiplied with the same input, as one.

    Attributes:
        parts: Matrices of one kind, block size and number of inputs; their columns follow one another.
        gated: There are two parts, gate and up: panels of the one and of the other take turns.
    """

    parts: tuple[StoredMatrix, ...]
    gated: bool = False

    def __post_init__(self) -> None:
        likes = {(part.kind, part.block_size, part.in_features) for part in self.parts}
        assert len(likes) == 1, f"matrices that cannot be one: {likes}"

    @property
    def in_features(self) -> int:
        """K."""
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        """N, columns of all parts."""
        return sum(part.out_features for part in self.parts)

    @property
    def kind(self) -> Kind:
        """What the values are."""
        return self.parts[0].kind

    def storage(self) -> Storage:
        """The narrowest exact storage; reads float32 values and the scales of 4-bit codes."""
        if self.kind == "float":
            return Storage(_float_format(self), "")
        if self.kind in ("int4", "uint4"):
            return Storage(self.kind, _scale_format(self))
        return Storage(self.kind, "")

    def size(self, storage: Storage) -> int:
        """Bytes of the packed weight."""
        columns = [part.out_features for part in self.parts] if self.gated else [self.out_features]
        return sum(panel_count(count) for count in columns) * _panel_bytes(self.in_features, storage)

    def pieces(self, storage: Storage) -> Iterator[NDArray[np.uint8]]:
        """Its bytes in order."""
        last = self.parts[0].out_features if self.gated else self.out_features
        elements = _COMPILED_ELEMENTS if compiled() and storage.format not in FLOATS else _SLAB_ELEMENTS
        for start, stop in _ranges(0, last, _MAPPED_ELEMENTS // self.in_features):
            with ExitStack() as stack:
                readers = [stack.enter_context(part.opened()) for part in self.parts]
                slabs = _ranges(start, stop, elements // self.in_features)
                yield from map_in_order(partial(self._slab, readers, storage), slabs)

    def _slab(
        self, readers: list[MatrixReader], storage: Storage, columns: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """The panels of some columns of the whole, or of some of both gate and up."""
        start, stop = columns
        if self.gated:
            both = [_encode(self.parts[0], [(reader, start, stop)], storage) for reader in readers]
            return np.stack(both, axis=1).reshape(-1)
        spans, first = [], 0
        for part, reader in zip(self.parts, readers, strict=True):
            begin, end = max(start - first, 0), min(stop - first, part.out_features)
            if begin < end:
                spans.append((reader, begin, end))
            first += part.out_features
        return _encode(self.parts[0], spans, storage).reshape(-1)


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of about `step` columns, whole panels but for the last."""
    step = max(step // PANEL, 1) * PANEL
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)


def _panel_bytes(in_features: int, storage: Storage) -> int:
    if storage.format in FLOATS:
        return in_features * PANEL * FLOATS[storage.format].itemsize
    blocks, scales = block_count(in_features), 2 if storage.scale_format == "float16" else 4
    if storage.format == "int8":
        return PANEL * 4 + blocks * BLOCK * PANEL
    if storage.format == "int8-block":
        return blocks * (PANEL * 4 + BLOCK * PANEL)
    zero_points = PANEL if storage.format == "uint4" else 0
    return blocks * (PANEL * scales + zero_points + BLOCK * PANEL // 2)


def _encode(part: StoredMatrix, spans: list[_Span], storage: Storage) -> NDArray[np.uint8]:
    """The panels of some columns, [P, bytes of a panel], of matrices like `part`."""
    if storage.format in FLOATS:
        codes = _joined([reader.columns(start, stop) for reader, start, stop in spans])
        return float_panels(_as_bits(codes, FLOATS[storage.format]))
    shared = _shared_by_blocks(part, spans, storage)
    whole = all((stop - start) % PANEL == 0 for _, start, stop in spans[:-1])
    if compiled() and whole and all(start % 2 == 0 for _, start, _ in spans):
        return _encode_compiled(part, spans, storage, shared)
    codes = _joined([reader.columns(start, stop) for reader, start, stop in spans])
    if storage.format in ("int8", "int8-block"):
        blocks = int8_panels(codes)
    else:
        blocks = int4_panels(codes, 8 if storage.format == "int4" else 0)
    if storage.format == "int8":
        return np.concatenate([shared[:, 0], blocks.reshape(len(blocks), -1)], axis=1)
    return np.concatenate([shared, blocks], axis=2).reshape(len(blocks), -1)


def _encode_compiled(
    part: StoredMatrix, spans: list[_Span], storage: Storage, shared: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """`_encode` of integers, in C++; of all spans but the last, columns fill panels."""
    size = _panel_bytes(part.in_features, storage)
    panels, header = np.empty((len(shared), size), np.uint8), shared.shape[2]
    if storage.format == "int8":
        # One scale a column, before all blocks.
        panels[:, :header] = shared[:, 0]
        block_bytes = BLOCK * PANEL
    else:
        panels.reshape(*shared.shape[:2], -1)[:, :, :header] = shared
        block_bytes = size // shared.shape[1]
    first = 0
    for reader, start, stop in spans:
        own = panels[first : first + panel_count(stop - start), header:]
        pack_panels(reader.stored_codes(), part.in_features, start, stop, own, block_bytes)
        first += len(own)
    return panels


def _shared_by_blocks(part: StoredMatrix, spans: list[_Span], storage: Storage) -> NDArray[np.uint8]:
    """Scales and zero points of each block, [P, C, bytes], as panels hold them."""
    scales = _joined([reader.scales(start, stop) for reader, start, stop in spans])
    if storage.format == "int8":
        return by_block(scales, BLOCK, None)
    narrow = scales.astype(np.float16 if storage.scale_format == "float16" else np.float32)
    shared = by_block(narrow, part.in_features, part.block_size)
    if storage.format != "uint4":
        return shared
    zeros = _joined([reader.zero_points(start, stop) for reader, start, stop in spans])
    return np.concatenate([shared, by_block(zeros, part.in_features, part.block_size)], axis=2)


def _joined(columns: list[NDArray[Any]]) -> NDArray[Any]:
    return columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)


def _as_bits(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Floats as `dtype`, which holds them exactly, in unsigned integers of its size."""
    if values.dtype == np.float32 and dtype == FLOATS["bfloat16"]:
        # The upper half of the bits; the type's own conversion takes five times as long.
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(dtype, copy=False).view(np.dtype(f"u{dtype.itemsize}"))


def _float_format(weight: PackedWeight) -> str:
    """The narrowest format that holds every value exactly."""
    dtypes = {part.codes.dtype for part in weight.parts}
    narrow = {"bfloat16", "float16"}
    if len(dtypes) == 1 and (name := dtypes.copy().pop().name.lower()) in narrow:
        return name
    for part in weight.parts:
        for start, stop in _ranges(0, part.out_features, _MAPPED_ELEMENTS // part.in_features):
            with part.opened() as reader:
                for begin, end in _ranges(start, stop, _SLAB_ELEMENTS // part.in_features):
                    values = reader.columns(begin, end).astype(np.float32, copy=False)
                    narrow = {name for name in narrow if _holds(name, values)}
                    if not narrow:
                        return "float32"
    return "bfloat16" if "bfloat16" in narrow else "float16"


def _holds(name: str, values: NDArray[np.float32]) -> bool:
    """Whether a 16-bit type holds float32 values exactly."""
    if name == "bfloat16":
        return not np.any(values.view(np.uint32) & np.uint32(0xFFFF))
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _scale_format(weight: PackedWeight) -> str:
    for part in weight.parts:
        with part.opened() as reader:
            if not _holds("float16", reader.scales(0, part.out_features)):
                return "float32"
    return "float16"
