"""What is done to every weight on its way to a file, in C++: rounding, the proof of it, and panels.

`kvgraph.quant` and `kvgraph.export.packed` say in NumPy what these functions compute, and do so where the library is
not compiled; results are the same bit for bit, but for the order of the sums of a proof. They leave the interpreter to
other threads.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.kernels import library_path

# Names of NumPy types -> numbers that the library knows them by.
FLOAT_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
INTEGER_FORMATS = {"int4": 0, "uint4": 1, "int8": 2, "uint8": 3}

_POINTER, _NUMBER, _COUNT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_ROUND = [_NUMBER, _NUMBER, _POINTER, _COUNT, _POINTER, _POINTER, _POINTER]
_ARGUMENTS = {
    "kvgraph_round_columns": [_POINTER, _NUMBER, _COUNT, _COUNT, _COUNT, *_ROUND],
    "kvgraph_round_rows": [_POINTER, _NUMBER, _COUNT, _COUNT, *_ROUND],
    "kvgraph_column_extremes": [_POINTER, _NUMBER, _COUNT, _COUNT, _POINTER, _POINTER],
    "kvgraph_round_by_column": [_POINTER, _NUMBER, _COUNT, _COUNT, _NUMBER, _POINTER, _POINTER, _POINTER],
    "kvgraph_compare_weights": [
        *(_POINTER, _NUMBER, _COUNT, _COUNT, _POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER, _COUNT, _COUNT),
        _POINTER,
    ],
    "kvgraph_pack_panels": [
        *(
            _POINTER,
            _COUNT,
            _NUMBER,
            _NUMBER,
            _NUMBER,
            _NUMBER,
            _COUNT,
            _COUNT,
            _COUNT,
            _POINTER,
            _COUNT,
            _COUNT,
        )
    ],
    "kvgraph_pack_halves": [_POINTER, _COUNT, _POINTER],
}


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = library_path()
    library = None if path is None else ctypes.CDLL(str(path))
    # One that was compiled before these functions were written does without them.
    if library is None or not all(hasattr(library, name) for name in _ARGUMENTS):
        return None
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _NUMBER
    return library


def compiled() -> bool:
    """Whether the functions below may be called."""
    return _library() is not None


def round_columns(
    values: NDArray[Any], block: int, format_name: str, scale_type: str, ratios: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]] | None:
    """Codes and scales of a matrix whose blocks lie along its columns.

    Args:
        values: [I, O] in one of `FLOAT_TYPES`.
        block: Rows that share a scale.
        format_name: One of `INTEGER_FORMATS`.
        scale_type: One of `FLOAT_TYPES`.
        ratios: Shares of the full range that are tried, the first of them 1.

    Returns:
        Codes [I, O], one a byte, scales [blocks, O] and zero points [blocks, O], of no meaning for symmetric formats;
        None where a value is not finite.
    """
    rows, columns = values.shape
    codes, scales, zeros = _results((rows, columns), (-(-rows // block), columns))
    shape = (rows, columns, block)
    bad = _call("kvgraph_round_columns", values, shape, format_name, scale_type, ratios, codes, scales, zeros)
    return None if bad else (codes, scales, zeros)


def round_rows(
    values: NDArray[Any], block: int, format_name: str, scale_type: str, ratios: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]] | None:
    """`round_columns` of the transpose of [O, I], whose blocks lie along rows and fill them; results are transposed.

    With more than one ratio, blocks have a multiple of 8 values and at most 128.
    """
    rows, columns = values.shape
    assert columns % block == 0
    assert ratios.size < 2 or (block % 8 == 0 and block <= 128)
    codes, scales, zeros = _results((rows, columns), (rows, columns // block))
    shape = (scales.size, block)
    bad = _call("kvgraph_round_rows", values, shape, format_name, scale_type, ratios, codes, scales, zeros)
    return None if bad else (codes, scales, zeros)


def column_extremes(values: NDArray[Any]) -> NDArray[np.float32] | None:
    """Least and largest value of each column, [2, O]; None where a value is not finite."""
    library = _library()
    assert library is not None
    values = np.ascontiguousarray(values)
    found = np.empty((2, values.shape[1]), np.float32)
    kind, (least, most) = FLOAT_TYPES[values.dtype.name], (_at(row) for row in found)
    bad = library.kvgraph_column_extremes(_at(values), kind, *values.shape, least, most)
    return None if bad else found


def round_by_column(
    values: NDArray[Any], format_name: str, scales: NDArray[np.float32], zeros: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    """Codes [r, O], one a byte, of finite values whose columns have scales and zero points [O]."""
    library = _library()
    assert library is not None
    values, codes = np.ascontiguousarray(values), np.empty(values.shape, np.uint8)
    shared = np.ascontiguousarray(scales), np.ascontiguousarray(scales if zeros is None else zeros)
    kind, number = FLOAT_TYPES[values.dtype.name], INTEGER_FORMATS[format_name]
    library.kvgraph_round_by_column(
        _at(values), kind, *values.shape, number, *(_at(each) for each in shared), _at(codes)
    )
    return codes


def pack_halves(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The low halves of bytes, two a byte, the first in the low half."""
    library = _library()
    assert library is not None
    codes = np.ascontiguousarray(codes)
    packed = np.empty((codes.size + 1) // 2, np.uint8)
    library.kvgraph_pack_halves(_at(codes), codes.size, _at(packed))
    return packed


def compare(
    exact: NDArray[Any],
    codes: NDArray[np.uint8],
    bits: int,
    compute: str,
    scales: NDArray[np.float32],
    zeros: NDArray[np.float32] | None,
    blocks: tuple[int, int],
) -> tuple[float, float, float]:
    """Sums of squares of exact values and of what they differ by from (codes - zeros) * scales; the largest difference.

    Args:
        exact: [R, C] in one of `FLOAT_TYPES`.
        codes: Signed ones as a file holds them, R * C * bits / 8 bytes; C is even where `bits` is 4.
        bits: 4 or 8.
        compute: Type that products are rounded to.
        scales: [blocks of rows, blocks of columns].
        zeros: Like the scales, or None.
        blocks: Rows and columns that share a scale.
    """
    library = _library()
    assert library is not None
    exact, found = np.ascontiguousarray(exact), np.empty(3, np.float64)
    scales, zeros = np.ascontiguousarray(scales), None if zeros is None else np.ascontiguousarray(zeros)
    rows, columns = exact.shape
    assert codes.flags.c_contiguous
    assert codes.size * 8 == rows * columns * bits
    assert scales.size == -(-rows // blocks[0]) * -(-columns // blocks[1])
    assert zeros is None or zeros.size == scales.size
    kind, product = FLOAT_TYPES[exact.dtype.name], FLOAT_TYPES[compute]
    shared = _at(scales), None if zeros is None else _at(zeros)
    library.kvgraph_compare_weights(
        _at(exact), kind, rows, columns, _at(codes), bits, product, *shared, *blocks, _at(found)
    )
    return float(found[0]), float(found[1]), float(found[2])


@dataclass(frozen=True, slots=True)
class Codes:
    """Integer codes of a matrix as they lie in a file.

    Attributes:
        rows: [K, N], or [K, N / 2] bytes with two codes each; transposed [N, K] or [N, K / 2].
        halves: Whether a byte holds two codes.
        transposed: Whether a row holds the inputs of an output.
        flip: What each code of 4 bits is changed by: 8 makes signed ones count from 0.
        fill: The code, flipped, that fills up blocks and panels.
    """

    rows: NDArray[Any]
    halves: bool
    transposed: bool
    flip: int
    fill: int


def pack_panels(
    codes: Codes, inputs: int, start: int, stop: int, panels: NDArray[np.uint8], block_bytes: int
) -> None:
    """Lay out outputs `start`, even, to `stop` as the codes of panels.

    Args:
        codes: What is laid out.
        inputs: K.
        start: First output.
        stop: Last output + 1.
        panels: [P, bytes of a panel], from where the codes of the first block begin.
        block_bytes: From the codes of one block to those of the next.
    """
    library = _library()
    assert library is not None
    assert codes.rows.strides[1] == codes.rows.itemsize == panels.strides[1] == 1
    assert panels.shape[0] == -(-(stop - start) // 16)
    facts = (int(codes.halves), int(codes.transposed), codes.flip, codes.fill)
    place = (_at(panels), panels.strides[0], block_bytes)
    library.kvgraph_pack_panels(_at(codes.rows), codes.rows.strides[0], *facts, inputs, start, stop, *place)


def _results(
    codes: tuple[int, int], scales: tuple[int, int]
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.uint8]]:
    return np.empty(codes, np.uint8), np.empty(scales, np.float32), np.empty(scales, np.uint8)


def _call(
    name: str,
    values: NDArray[Any],
    shape: tuple[int, ...],
    format_name: str,
    scale_type: str,
    ratios: NDArray[np.float32],
    codes: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zeros: NDArray[np.uint8],
) -> bool:
    """Round; whether a value is not finite."""
    values, ratios = np.ascontiguousarray(values), np.ascontiguousarray(ratios)
    kinds = INTEGER_FORMATS[format_name], FLOAT_TYPES[scale_type]
    results = (_at(codes), _at(scales), _at(zeros))
    return bool(
        getattr(_library(), name)(
            _at(values), FLOAT_TYPES[values.dtype.name], *shape, *kinds, _at(ratios), ratios.size, *results
        )
    )


def _at(array: NDArray[Any]) -> int:
    return array.ctypes.data
