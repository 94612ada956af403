"""Matrices as canonical graphs store them, read a few columns at a time."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.bfloat16 import BFLOAT16, widen
from kvgraph.runtime.kernels.weights import Codes

# What the values of a matrix are: floats; signed bytes with one scale a column or one a block; half bytes in blocks,
# without and with a zero point.
Kind = Literal["float", "int8", "int8-block", "int4", "uint4"]

_HALF_BYTES = (ir.DataType.INT4, ir.DataType.UINT4)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [K, N] of a canonical graph: K inputs, N outputs.

    Attributes:
        codes: Its values or codes, [K, N]; [N, K] where `transposed`, which is how tables lie.
        transposed: Whether the rows of `codes` are columns of the matrix.
        scale: [N], or [blocks, N] and where `transposed` [N, blocks]; None for floats.
        zero_point: Of the scale's shape; None: zero.
        block_size: Inputs that share a scale; None: all of them.
    """

    codes: ir.TensorProtocol
    transposed: bool = False
    scale: ir.TensorProtocol | None = None
    zero_point: ir.TensorProtocol | None = None
    block_size: int | None = None

    @property
    def in_features(self) -> int:
        """K."""
        return int(self.codes.shape.numpy()[1 if self.transposed else 0])

    @property
    def out_features(self) -> int:
        """N."""
        return int(self.codes.shape.numpy()[0 if self.transposed else 1])

    @property
    def kind(self) -> Kind:
        """What its values are."""
        if self.scale is None:
            return "float"
        if self.codes.dtype == ir.DataType.INT8:
            return "int8" if self.block_size is None else "int8-block"
        return "int4" if self.zero_point is None and self.codes.dtype == ir.DataType.INT4 else "uint4"

    @contextmanager
    def opened(self) -> Iterator[MatrixReader]:
        """The matrix while its files are mapped."""
        with ExitStack() as stack:
            tensors = (self.codes, self.scale, self.zero_point)
            rows = [
                None if tensor is None else stack.enter_context(_mapped_rows(tensor)) for tensor in tensors
            ]
            yield MatrixReader(self, *rows)


class MatrixReader:
    """Reads some columns of a matrix at a time.

    Args:
        matrix: What is read.
        codes: Its codes.
        scale: Its scale, if it has one.
        zero_point: Its zero points, if it has some.
    """

    def __init__(
        self, matrix: StoredMatrix, codes: _Rows | None, scale: _Rows | None, zero_point: _Rows | None
    ) -> None:
        assert codes is not None
        self._matrix, self._codes, self._scale, self._zero_point = matrix, codes, scale, zero_point

    def columns(self, start: int, stop: int) -> NDArray[Any]:
        """Columns [K, stop - start]: floats in their own type, int8, or uint8 that holds one 4-bit code each.

        4-bit codes are given from 0: those of INT4 are 8 more than in the file.
        """
        return self._read(self._codes, start, stop)

    def stored_codes(self) -> Codes:
        """Integer codes where they lie, mapped."""
        signed, rows = self._codes.halves and self._codes.signed, self._codes
        fill = 8 if self._matrix.kind == "int4" else 0
        return Codes(rows.data, rows.halves, self._matrix.transposed, 8 if signed else 0, fill)

    def scales(self, start: int, stop: int) -> NDArray[np.float32]:
        """The scales of some columns as float32: [blocks, stop - start], one block where all inputs share one."""
        assert self._scale is not None, "floats have no scales"
        scales = self._read(self._scale, start, stop)
        return widen(scales) if scales.dtype == BFLOAT16 else scales.astype(np.float32)

    def zero_points(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The zero points of some columns, [blocks, stop - start], counted as the codes are."""
        if self._zero_point is not None:
            return self._read(self._zero_point, start, stop)
        signed = self._matrix.codes.dtype == ir.DataType.INT4
        return np.full(self.scales(start, stop).shape, 8 if signed else 0, np.uint8)

    def _read(self, rows: _Rows, start: int, stop: int) -> NDArray[Any]:
        if rows.vector:
            return rows.block(slice(None), slice(start, stop))
        if self._matrix.transposed:
            return rows.block(slice(start, stop), slice(None)).T
        return rows.block(slice(None), slice(start, stop))


@dataclass(frozen=True, slots=True)
class _Rows:
    """A mapped tensor of one or two dimensions.

    Attributes:
        data: [rows, columns] elements; [rows, columns / 2] bytes of 4-bit codes.
        width: Columns.
        halves: Whether a byte of `data` holds two codes.
        signed: Whether codes are given 8 higher than they are.
        vector: Whether the tensor has one dimension, and is read as one row.
    """

    data: NDArray[Any]
    width: int
    halves: bool
    signed: bool
    vector: bool

    def block(self, rows: slice, columns: slice) -> NDArray[Any]:
        """A copy of some rows and columns; 4-bit codes one a byte and from 0."""
        if not self.halves:
            return np.array(self.data[rows, columns])
        first, last, _ = columns.indices(self.width)
        octets = self.data[rows, first // 2 : (last + 1) // 2]
        codes = _halves(octets)[:, first % 2 : first % 2 + last - first]
        return codes ^ np.uint8(8) if self.signed else codes


def _halves(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Both halves of bytes, the low one first, along the last axis."""
    pairs = octets.astype("<u2")
    pairs |= pairs << np.uint16(4)
    pairs &= np.uint16(0x0F0F)
    return pairs.view(np.uint8)


@contextmanager
def _mapped_rows(tensor: ir.TensorProtocol) -> Iterator[_Rows]:
    shape = [int(dim) for dim in tensor.shape.numpy()]
    height, width = shape if len(shape) == 2 else (1, math.prod(shape))
    halves, signed = tensor.dtype in _HALF_BYTES, tensor.dtype == ir.DataType.INT4
    with mapped_bytes(tensor) as octets:
        if not halves:
            data = octets.view(tensor.dtype.numpy()).reshape(height, width)
        elif width % 2 == 0:
            data = octets.reshape(height, width // 2)
        else:
            # A row may begin in the middle of a byte: laid out anew, with rows of whole bytes.
            codes = _halves(octets)[: height * width].reshape(height, width)
            padded = np.pad(codes, ((0, 0), (0, 1)))
            data = padded[:, ::2] | padded[:, 1::2] << np.uint8(4)
        yield _Rows(data, width, halves, signed, len(shape) != 2)


@contextmanager
def mapped_bytes(tensor: ir.TensorProtocol) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor; those of a file are mapped, and leave memory with the last array that reads them."""
    if not isinstance(tensor, ir.ExternalTensor):
        yield np.frombuffer(tensor.tobytes(), np.uint8)
        return
    offset, length = tensor.offset or 0, tensor.length
    assert length is not None, "the writer of a weights file says how long a tensor is"
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    with Path(tensor.base_dir, tensor.location).open("rb") as file:
        content = mmap.mmap(file.fileno(), skipped + length, access=mmap.ACCESS_READ, offset=offset - skipped)
    yield np.frombuffer(content, np.uint8, length, skipped)
