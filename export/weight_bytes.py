"""Checkpoint tensors in the form that the graphs store: converted, transposed, a piece at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvgraph.models.sources import WeightPlan, WeightSource
from kvgraph.models.weights import WeightStream

# Measured: a matrix is turned fastest in pieces that fit a core's cache, and larger ones write no faster.
PIECE_BYTES = 2 << 20


def weight_pieces(
    stream: WeightStream, parameter: str, source: WeightSource, dtype: torch.dtype
) -> Iterator[Tensor]:
    """A parameter's rows in order, in pieces of about `PIECE_BYTES`, as `dtype`.

    A tensor whose stored columns are wanted (transposed, or cut along axis 1) is read whole; any other is read a
    piece at a time. Stacked tensors follow one another, which is how their stack lies in memory.

    Raises:
        ValueError: A value of the checkpoint is not finite, or overflows `dtype`.
    """
    for name in source.names:
        for piece in _stored_pieces(stream, name, source, max(dtype.itemsize, 4)):
            shifted = piece if source.add == 0 else piece.to(torch.float32) + source.add
            converted = shifted.to(dtype).contiguous()
            _require_range(parameter, shifted, converted)
            yield converted


def _require_range(parameter: str, given: Tensor, converted: Tensor) -> None:
    largest = torch.finfo(converted.dtype).max
    if largest >= torch.finfo(given.dtype).max or not converted.numel():
        return
    low, high = (bound.item() for bound in torch.aminmax(converted))
    if math.isinf(low) or math.isinf(high):
        dtype = str(converted.dtype).removeprefix("torch.")
        wider = "bfloat16 or float32" if converted.dtype == torch.float16 else "float32"
        raise ValueError(
            f"{parameter}: holds {given.abs().max().item():g}, more than {dtype}'s {largest:g}; "
            f"export with --dtype {wider}"
        )


def _stored_pieces(stream: WeightStream, name: str, source: WeightSource, itemsize: int) -> Iterator[Tensor]:
    """Pieces of one tensor, in the parameter's orientation and the checkpoint's type."""
    shape = stream.spec(name).shape
    if source.transpose or source.axis == 1:
        whole = stream.read_rows(name, 0, shape[0])
        if source.ranges:
            whole = torch.cat([whole.narrow(source.axis, a, b - a) for a, b in source.ranges], source.axis)
        yield from (
            _turned(whole, itemsize) if source.transpose else torch.split(whole, _step(whole, itemsize))
        )
        return
    step = max(1, PIECE_BYTES // (itemsize * math.prod(shape[1:])))
    for start, stop in source.ranges or ((0, shape[0]),):
        for row in range(start, stop, step):
            yield stream.read_rows(name, row, min(row + step, stop))


def _turned(matrix: Tensor, itemsize: int) -> Iterator[Tensor]:
    """The transpose of a matrix, a few rows at a time.

    The columns are copied out first: torch turns a whole matrix about five times as fast as part of a larger one.
    """
    for columns in torch.split(matrix, _step(matrix.T, itemsize), dim=1):
        yield columns.contiguous().T


def _step(rows: Tensor, itemsize: int) -> int:
    return max(1, PIECE_BYTES // (itemsize * math.prod(rows.shape[1:])))


@contextmanager
def one_thread() -> Iterator[None]:
    """Convert on one core: the others write and hash meanwhile, and pieces are too small to share (twice the time)."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def as_bytes(pieces: Iterator[Tensor]) -> Iterator[memoryview]:
    """The memory of each piece."""
    for piece in pieces:
        yield piece.reshape(-1).view(torch.uint8).numpy().data


def check_tied(stream: WeightStream, plan: WeightPlan) -> None:
    """A tied matrix that the checkpoint holds all the same must repeat the one it is tied to.

    Raises:
        ValueError: The two differ: the config says one thing and the file another.
    """
    for name, original_name in plan.tied.items():
        if name not in stream.names:
            continue
        original, copy = stream.spec(original_name), stream.spec(name)
        equal = copy.shape == original.shape
        step = max(1, PIECE_BYTES // (4 * original.shape[-1]))
        for start in range(0, original.shape[0], step):
            stop = min(start + step, original.shape[0])
            equal = equal and torch.equal(
                stream.read_rows(name, start, stop), stream.read_rows(original_name, start, stop)
            )
        if not equal:
            raise ValueError(
                f"{copy.file}: {name!r} differs from {original_name!r}, but config.json says tie_word_embeddings; "
                "set it to false to use the separate head, or remove the tensor"
            )
