"""The tensors of a bundle's weights file as NumPy arrays, read a piece at a time.

Pieces are read with pread and not through a mapping: pages of a mapped file count as memory of the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvgraph.export.bfloat16 import BFLOAT16, widen
from kvgraph.export.bundle import Bundle
from kvgraph.export.weight_kinds import element_bits
from kvgraph.export.weights_file import WEIGHTS_FILE, StoredTensor
from kvgraph.quant.formats import Floats

# ONNX-style dtype -> NumPy type of one element, 4-bit ones unpacked.
NUMPY_TYPES: dict[str, np.dtype[np.generic]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int4": np.dtype(ml_dtypes.int4),
    "uint4": np.dtype(ml_dtypes.uint4),
    "float4_e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}
_INT4 = NUMPY_TYPES["int4"]


class FloatWeights(Protocol):
    """Tensors to quantize, wherever they are."""

    @property
    def path(self) -> Path:
        """What they are read from, to be named in errors."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Name -> dtype, shape and size."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """Entries `start` to `stop` along the first axis, in the tensor's type."""

    def read_columns(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """Columns `start` to `stop` of a matrix."""

    def read_expert(self, name: str, expert: int, start: int, stop: int) -> NDArray[np.generic]:
        """The same of one of several stacked matrices."""


class BundleWeights:
    """An open weights file; a context manager.

    Args:
        bundle: Whose weights.

    Raises:
        ValueError: The bundle has no weights, or its file does not hold what bundle.json says.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.path = bundle.path / WEIGHTS_FILE
        if WEIGHTS_FILE not in bundle.files:
            raise ValueError(
                f"{bundle.path}: has no weights; export it again with kvgraph export, without --no-weights"
            )
        self._descriptor = os.open(self.path, os.O_RDONLY)
        try:
            self.tensors = _locate(self.path, self._descriptor, bundle)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; reading is over."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> BundleWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape of a tensor."""
        return self._tensor(name).shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """Entries `start` to `stop` along the first axis, in the stored type; 4-bit elements one a byte.

        Raises:
            ValueError: There is no such tensor, or a part of a 4-bit one does not begin with a whole byte.
        """
        stored = self._tensor(name)
        if not stored.shape:
            return self._elements(stored, 0, 1).reshape(())
        stop = stored.shape[0] if stop is None else stop
        row = math.prod(stored.shape[1:])
        return self._elements(stored, start * row, (stop - start) * row).reshape(-1, *stored.shape[1:])

    def read_octets(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of entries `start` to `stop` along the first axis, which begin and end with whole ones."""
        stored = self._tensor(name)
        bits = math.prod(stored.shape[1:]) * element_bits(stored.dtype)
        assert start * bits % 8 == stop * bits % 8 == 0
        return self._bytes(stored, start * bits // 8, (stop - start) * bits // 8)

    def read_columns(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """Columns `start` to `stop` of a matrix whose elements fill bytes, in the stored type."""
        stored = self._tensor(name)
        rows, columns = stored.shape
        if stop - start == columns:
            return self.read(name)
        result = np.empty((rows, stop - start), NUMPY_TYPES[stored.dtype])
        size = result.dtype.itemsize
        for row in range(rows):
            data = self._bytes(stored, (row * columns + start) * size, (stop - start) * size)
            result[row] = data.view(result.dtype)
        return result

    def read_expert(self, name: str, expert: int, start: int, stop: int) -> NDArray[np.generic]:
        """The same of one of several stacked matrices, which is read whole."""
        return self.read(name, expert, expert + 1)[0, :, start:stop]

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise ValueError(f"{self.path}: holds no tensor {name!r}")
        return self.tensors[name]

    def _elements(self, stored: StoredTensor, first: int, count: int) -> NDArray[np.generic]:
        bits = element_bits(stored.dtype)
        if first * bits % 8:
            raise ValueError(f"{self.path}: element {first} of {stored.name!r} does not begin a byte")
        octets = self._bytes(stored, first * bits // 8, (count * bits + 7) // 8)
        kind = NUMPY_TYPES[stored.dtype]
        return octets.view(kind) if bits >= 8 else unpack(octets, count, kind)

    def _bytes(self, stored: StoredTensor, offset: int, size: int) -> NDArray[np.uint8]:
        if not 0 <= offset <= offset + size <= stored.size:
            raise ValueError(f"{self.path}: bytes {offset} to {offset + size} are not all in {stored.name!r}")
        # Of its own, so that arrays over it may be written.
        data = np.empty(size, np.uint8)
        view, done = data.data, 0
        while done < size:
            got = os.preadv(self._descriptor, [view[done:]], stored.offset + offset + done)
            if got == 0:
                raise ValueError(f"{self.path}: ends inside {stored.name!r}; export the bundle again")
            done += got
        return data


def as_float32(values: NDArray[np.generic]) -> Floats:
    """The values as float32; the array itself where they are.

    The types of ml_dtypes hold up every other thread while they are converted: the common ones go by way of integers.
    """
    if values.dtype == BFLOAT16:
        return widen(values)
    if values.dtype == _INT4:
        # Only the low half of a byte counts: 8 to 15 are -8 to -1.
        codes = values.view(np.uint8) & np.uint8(0x0F)
        codes ^= np.uint8(8)
        codes -= np.uint8(8)
        return codes.view(np.int8).astype(np.float32)
    return values.astype(np.float32, copy=False)


def round_to(values: Floats, kind: np.dtype[np.generic]) -> Floats:
    """Values rounded to another type of floats, to nearest and ties to even, as float32; may change `values`."""
    if kind == np.float32:
        return values
    if kind != BFLOAT16 or not values.flags.c_contiguous:
        return as_float32(values.astype(kind))
    bits = values.view(np.uint32)
    # Half of the last bit that stays, less one where that bit is even.
    half = (bits >> np.uint32(16)) & np.uint32(1)
    half += np.uint32(0x7FFF)
    bits += half
    bits &= np.uint32(0xFFFF0000)
    return values


def unpack(octets: NDArray[np.uint8], count: int, kind: np.dtype[np.generic]) -> NDArray[np.generic]:
    """`count` 4-bit elements from bytes that hold two each, the first in the low half."""
    pairs = octets.astype("<u2")
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    return pairs.view(np.uint8)[:count].view(kind)


def _locate(path: Path, descriptor: int, bundle: Bundle) -> dict[str, StoredTensor]:
    """Every tensor of bundle.json, where the file's header puts it."""
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    size = os.fstat(descriptor).st_size
    if not 0 < length <= size - 8:
        raise ValueError(f"{path}: header of {length} bytes in a file of {size}; export the bundle again")
    try:
        header = json.loads(os.pread(descriptor, length, 8))
    except ValueError as error:
        raise ValueError(f"{path}: not a safetensors file ({error}); export the bundle again") from error
    tensors, sizes = {}, bundle.weight_sizes()
    for name, entry in bundle.weights.items():
        if name not in header:
            raise ValueError(f"{path}: does not hold {name!r}, which bundle.json lists; export it again")
        start, stop = header[name]["data_offsets"]
        expected = sizes[name]
        if stop - start != expected or not 0 <= start <= stop <= size - 8 - length:
            raise ValueError(
                f"{path}: {name!r} has bytes {start} to {stop}, bundle.json asks for {expected}; export it again"
            )
        place = 8 + length + start
        tensors[name] = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), place, expected)
    return tensors
