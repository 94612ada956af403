"""The header of a safetensors file, checked before anything is believed.

Layout: 8 bytes little-endian length of the header, the header as JSON, then the tensors end to end. The header maps
every name to its dtype, shape and `data_offsets`, counted from the end of the header.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraph.models.strict_json import parse_json_object

# Bytes of an element. Types that pack several elements into a byte are left out.
ITEM_SIZES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
LENGTH_BYTES = 8
# The limit that the safetensors library itself sets.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a safetensors file holds it.

    Attributes:
        name: Name in the file.
        dtype: A key of `ITEM_SIZES`.
        shape: Dimensions, row-major.
        offset: First byte, counted from the start of the file.
        nbytes: Length in bytes.
        file: The file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: Path


def read_header(path: Path) -> bytes:
    """The JSON bytes of a file's header.

    Raises:
        ValueError: The file is too short, or the length in front of the header is not plausible.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
            raise ValueError(
                f"{path}: header of {length} bytes in a file of {size}, expected at most "
                f"{min(max(size - LENGTH_BYTES, 0), MAX_HEADER_BYTES)}; the file is damaged or not safetensors"
            )
        return file.read(length)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, in the order in which the data lies.

    Raises:
        ValueError: The header is malformed, or does not describe exactly the bytes that follow it.
    """
    header = read_header(path)
    entries = parse_json_object(header, str(path))
    entries.pop("__metadata__", None)
    data_start = LENGTH_BYTES + len(header)
    tensors = [_stored_tensor(path, name, entry, data_start) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    size = path.stat().st_size
    described = max((tensor.offset + tensor.nbytes for tensor in tensors), default=data_start)
    if size != described:
        fault = "cut short or damaged" if size < described else "followed by bytes that no tensor owns"
        raise ValueError(
            f"{path}: the file has {size} bytes, its header describes {described}: it is {fault}"
        )
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} starts at byte {tensor.offset}, expected {end} where the one "
                "before it ends; the file is damaged"
            )
        end += tensor.nbytes
    return {tensor.name: tensor for tensor in tensors}


def _stored_tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{path}: tensor {name!r} has header entry {entry!r}, expected dtype, shape, data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
        raise ValueError(f"{path}: tensor {name!r} has dtype {dtype!r}; known: {', '.join(ITEM_SIZES)}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise ValueError(
            f"{path}: tensor {name!r} has shape {shape!r} and data_offsets {offsets!r}; damaged header"
        )
    begin, end = offsets
    nbytes = math.prod(shape) * ITEM_SIZES[dtype]
    if end - begin != nbytes:
        raise ValueError(
            f"{path}: tensor {name!r} occupies {end - begin} bytes, but {dtype} {shape} needs {nbytes}; damaged header"
        )
    return StoredTensor(name, dtype, tuple(shape), data_start + begin, nbytes, path)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
