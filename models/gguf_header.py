"""Reading the values that the header of a GGUF file is made of, with every length checked against the file.

All numbers are little-endian. A string is its length in bytes, 64 bits, and UTF-8. An array is the type of its
elements, 32 bits, their number, 64 bits, and the elements.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

# What a metadata entry may hold; numbers are never numpy's.
Value = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


class HeaderReader:
    """The header of one file, read from front to back.

    Attributes:
        position: Bytes read so far.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        """Read `file`, naming `path` in every error."""
        self._path = path
        self._file = file
        self._size = path.stat().st_size
        # A count of one's own: a vocabulary has hundreds of thousands of strings, and asking the file is slow.
        self.position = 0

    def read(self, count: int) -> bytes:
        """The next `count` bytes.

        Raises:
            ValueError: The file ends before.
        """
        left = self._size - self.position
        if count > left:
            raise ValueError(
                f"{self._path}: the header asks for {count} bytes at byte {self.position}, of which {left} are there; "
                "the file is cut short or damaged"
            )
        self.position += count
        return self._file.read(count)

    def count(self) -> int:
        """A 64-bit count or offset."""
        return int.from_bytes(self.read(8), "little")

    def word(self) -> int:
        """A 32-bit number."""
        return int.from_bytes(self.read(4), "little")

    def text(self) -> str:
        """A string.

        Raises:
            ValueError: The file ends before it, or it is not UTF-8.
        """
        start = self.position
        try:
            return self.read(self.count()).decode()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self._path}: the string at byte {start} is not UTF-8; damaged header"
            ) from error

    def value(self, key: str) -> Value:
        """The value of the metadata entry `key`, its type first.

        Raises:
            ValueError: The file ends before it, or its type is not known.
        """
        kind = self.word()
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            kind, count = self.word(), self.count()
            if kind == GGUFValueType.STRING:
                return [self.text() for _ in range(count)]
            numbers: list[bool] | list[int] | list[float] = self._numbers(key, kind, count).tolist()
            return numbers
        (number,) = self._numbers(key, kind, 1)
        # The decimal that was rounded to this float, 1e-05 and not 9.999999747378752e-06.
        value: bool | int | float = float(str(number)) if kind == GGUFValueType.FLOAT32 else number.item()
        return value

    def _numbers(self, key: str, kind: int, count: int) -> NDArray[np.generic]:
        if kind not in _NUMBERS:
            raise ValueError(
                f"{self._path}: metadata {key!r} has type {kind}, which is not known; damaged header"
            )
        dtype = np.dtype(_NUMBERS[GGUFValueType(kind)])
        return np.frombuffer(self.read(count * dtype.itemsize), dtype)
