"""A GGUF file: its metadata, and where its tensors lie. Nothing of it is believed unchecked.

Layout: "GGUF", version, number of tensors, number of metadata entries; the entries, each a key and a value; of each
tensor its name, dimensions, type and offset; then, aligned, the data. Dimensions are stored with the innermost first,
so that a matrix of a linear layer, [out, in] here as everywhere, is stored as in, out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGMLQuantizationType

from kvgraph.models.gguf_header import HeaderReader, Value

VERSIONS = (2, 3)
MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as a GGUF file holds it.

    Attributes:
        name: Name in the file.
        type: How its elements are stored.
        shape: Dimensions, row-major.
        offset: First byte, counted from the start of the file.
        file: The file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    file: Path

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        block, block_bytes = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * block_bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF file's header.

    Attributes:
        path: The file.
        metadata: Key -> value.
        tensors: Name -> tensor, in the order in which the data lies.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """The header of a GGUF file.

    Raises:
        ValueError: It is malformed, or does not describe the bytes that follow it.
    """
    with path.open("rb") as file:
        reader = HeaderReader(path, file)
        tensor_count = _read_preamble(path, reader)
        metadata = _read_metadata(path, reader, reader.count())
        described = [_read_tensor(path, reader) for _ in range(tensor_count)]
        alignment = _alignment(path, metadata)
        start = -(-reader.position // alignment) * alignment
    tensors = [GGUFTensor(name, kind, shape, start + offset, path) for name, kind, shape, offset in described]
    tensors.sort(key=lambda tensor: tensor.offset)
    _check_extents(path, tensors, start, alignment)
    return GGUFFile(path, metadata, {tensor.name: tensor for tensor in tensors})


def _read_preamble(path: Path, reader: HeaderReader) -> int:
    """The number of tensors, once it is sure that this is a GGUF file of a known version."""
    if reader.read(4) != GGUF_MAGIC.to_bytes(4, "little"):
        raise ValueError(f"{path}: does not begin with 'GGUF'; the file is damaged or not a GGUF file")
    version = reader.word()
    if version & 0xFFFF == 0:
        raise ValueError(
            f"{path}: is a big-endian GGUF file; convert the model again on a little-endian machine"
        )
    if version not in VERSIONS:
        raise ValueError(f"{path}: GGUF version {version}, expected 2 or 3; convert the model again")
    return reader.count()


def _read_metadata(path: Path, reader: HeaderReader, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for _ in range(count):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"{path}: metadata {key!r} appears twice; damaged header")
        metadata[key] = reader.value(key)
    return metadata


def _read_tensor(path: Path, reader: HeaderReader) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
    """Name, type, shape, and offset from the start of the data."""
    name, dimensions = reader.text(), reader.word()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ValueError(
            f"{path}: tensor {name!r} has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}"
        )
    shape = tuple(reader.count() for _ in range(dimensions))[::-1]
    number, offset = reader.word(), reader.count()
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"{path}: tensor {name!r} has type {number}, which is not known") from None
    block, _ = GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[-1] % block:
        raise ValueError(
            f"{path}: tensor {name!r} has shape {list(shape)}, expected rows of a multiple of {block} elements, the "
            f"block of {kind.name}; damaged header"
        )
    return name, kind, shape, offset


def _alignment(path: Path, metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{path}: general.alignment is {alignment!r}, expected a power of two")
    return alignment


def _check_extents(path: Path, tensors: list[GGUFTensor], start: int, alignment: int) -> None:
    """Refuse tensors that share a name or bytes, or reach beyond the file."""
    size, end = path.stat().st_size, start
    names: set[str] = set()
    for tensor in tensors:
        if tensor.name in names:
            raise ValueError(f"{path}: tensor {tensor.name!r} appears twice; damaged header")
        names.add(tensor.name)
        if tensor.offset < end or (tensor.offset - start) % alignment:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} starts at byte {tensor.offset}, expected a multiple of {alignment} "
                f"bytes after byte {start} that is not before {end}, where the one before it ends; damaged header"
            )
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} ends at byte {end}, but the file has {size} bytes; it is cut short "
                "or damaged"
            )
