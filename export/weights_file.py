"""One `weights.safetensors` for all graphs: valid for any safetensors tool, and the graphs' ONNX external data.

The file is laid out before the first byte is written, from names, dtypes and shapes alone, so that the graphs can
point into it and the tensors can be streamed. Wider elements come first and the header is padded, so every tensor
starts on a multiple of its element size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

WEIGHTS_FILE = "weights.safetensors"

# ONNX-style dtype -> (safetensors dtype, elements per byte numerator/denominator as bits)
_SAFETENSORS = {
    "float64": ("F64", 64),
    "float32": ("F32", 32),
    "float16": ("F16", 16),
    "bfloat16": ("BF16", 16),
    "float8_e4m3fn": ("F8_E4M3", 8),
    "int64": ("I64", 64),
    "int32": ("I32", 32),
    "int8": ("I8", 8),
    "uint8": ("U8", 8),
    # Two elements a byte, low half first; safetensors tools see the bytes as one dimension.
    "int4": ("U8", 4),
    "uint4": ("U8", 4),
    "float4_e2m1": ("U8", 4),
}
_DATA_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's place in the file.

    Attributes:
        name: Name in the graphs and in the file.
        dtype: ONNX-style dtype, "float16" or "int4".
        shape: Logical shape.
        offset: First byte, counted from the start of the file.
        size: Bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """The whole file, decided before it is written.

    Attributes:
        header: Everything before the first tensor.
        tensors: Name -> place, in file order.
        size: Bytes of the file.
    """

    header: bytes
    tensors: Mapping[str, StoredTensor]
    size: int


def plan_layout(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> WeightLayout:
    """Lay out a file for `specs`, name -> (dtype, shape)."""
    order = sorted(specs, key=lambda name: -_SAFETENSORS[specs[name][0]][1])
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for name in order:
        dtype, shape = specs[name]
        code, bits = _SAFETENSORS[dtype]
        size = (math.prod(shape) * bits + 7) // 8
        visible = list(shape) if bits >= 8 else [size]
        entries[name] = {"dtype": code, "shape": visible, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _DATA_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    tensors, start = {}, len(header)
    for name in order:
        dtype, shape = specs[name]
        size = (math.prod(shape) * _SAFETENSORS[dtype][1] + 7) // 8
        tensors[name] = StoredTensor(name, dtype, shape, start, size)
        start += size
    return WeightLayout(header, tensors, start)


def write_weights(
    path: Path, layout: WeightLayout, tensors: Iterable[tuple[str, Iterator[memoryview]]]
) -> str:
    """Stream every tensor to `path` in layout order and return the file's sha256.

    Args:
        path: New file.
        layout: Where everything goes.
        tensors: (name, its bytes in pieces), in the order of `layout.tensors`.

    Raises:
        OSError: There is no room for the file; known before the first tensor is asked for.
        ValueError: The tensors are not those of the layout.
    """
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, layout.size)
        chunks = itertools.chain([memoryview(layout.header)], _in_order(path.name, layout, tensors))
        sha256 = _write_hashed(file, chunks)
        file.flush()
        os.fsync(file.fileno())
    return sha256


def _in_order(
    label: str, layout: WeightLayout, tensors: Iterable[tuple[str, Iterator[memoryview]]]
) -> Iterator[memoryview]:
    """The pieces of all tensors, which must be those of the layout."""
    names = iter(layout.tensors.values())
    for name, pieces in tensors:
        expected = next(names, None)
        if expected is None or expected.name != name:
            raise ValueError(f"{label}: tensor {name!r} comes where the layout has {expected}")
        size = 0
        for piece in pieces:
            size += piece.nbytes
            yield piece
        if size != expected.size:
            raise ValueError(f"{label}: {name!r} has {size} bytes, the layout says {expected.size}")
    if (missing := next(names, None)) is not None:
        raise ValueError(f"{label}: tensor {missing.name!r} was not written")


def _write_hashed(file: IO[bytes], chunks: Iterable[memoryview]) -> str:
    """Write `chunks` and return their sha256; one is written and hashed while the next is being made."""
    digest = hashlib.sha256()
    begun: list[Future[Any]] = []
    with ThreadPoolExecutor(2) as threads:
        for chunk in chunks:
            _finish(begun)
            begun = [threads.submit(file.write, chunk), threads.submit(digest.update, chunk)]
        _finish(begun)
    return digest.hexdigest()


def _finish(begun: Iterable[Future[Any]]) -> None:
    for work in begun:
        work.result()


class WeightsWriter:
    """Writes the tensors of a layout in any order, also a tensor's parts; a context manager that closes the file.

    Several threads may write at a time.

    Args:
        path: New file.
        layout: Where everything goes.
    """

    def __init__(self, path: Path, layout: WeightLayout) -> None:
        self.layout = layout
        self._file = path.open("x+b")
        self._missing = {name: stored.size for name, stored in layout.tensors.items()}
        self._counting = Lock()
        # A disk that is too full says so now.
        os.posix_fallocate(self._file.fileno(), 0, layout.size)
        self._write(memoryview(layout.header), 0)

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, name: str, data: memoryview, offset: int = 0) -> None:
        """Put bytes into a tensor, `offset` bytes behind its first; no byte may be written twice.

        Raises:
            ValueError: There is no such tensor, or it has no room for so many bytes.
        """
        if name not in self.layout.tensors:
            raise ValueError(f"{self._file.name}: the layout has no tensor {name!r}")
        stored, size = self.layout.tensors[name], data.nbytes
        if not 0 <= offset <= offset + size <= stored.size or size > self._missing[name]:
            raise ValueError(
                f"{self._file.name}: {size} bytes at {offset} of {name!r}, which has {stored.size} bytes and misses "
                f"{self._missing[name]}"
            )
        self._write(data, stored.offset + offset)
        with self._counting:
            self._missing[name] -= size

    def finish(self) -> str:
        """The file's sha256, once it is complete and on the disk.

        Raises:
            ValueError: Bytes of a tensor were not written.
        """
        missing = [name for name, size in self._missing.items() if size]
        if missing:
            raise ValueError(
                f"{self._file.name}: {len(missing)} tensors were not written, {missing[0]!r} the first"
            )
        os.fsync(self._file.fileno())
        self._file.seek(0)
        return hashlib.file_digest(self._file, "sha256").hexdigest()

    def _write(self, data: memoryview, offset: int) -> None:
        view, done = data.cast("B"), 0
        while done < view.nbytes:
            done += os.pwrite(self._file.fileno(), view[done:], offset + done)
