"""A model's parameters, read from a checkpoint in the form that the graphs store: any rows, turned and converted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

import torch
from torch import Tensor

from kvgraph.export.in_order import map_in_order
from kvgraph.models.sources import WeightSource
from kvgraph.models.weights import WeightStream

# Measured: a matrix is turned fastest in pieces that fit a core's cache, and larger ones write no faster.
PIECE_BYTES = 2 << 20
# Of a tensor that is kept: each core reads so much at a time.
_SLAB_BYTES = 8 << 20

Ranges = Sequence[tuple[int, int]]


class ParameterRows:
    """Reads parameters; several threads may do so at a time, which is best done inside `one_thread`.

    Rows that the checkpoint stores as columns are cut out of the whole tensor, in the type and the order of the
    checkpoint. The one that was read last is kept, and no other.

    Args:
        stream: The checkpoint's weights.
        sources: Parameter -> what it is made from.
    """

    def __init__(self, stream: WeightStream, sources: Mapping[str, WeightSource]) -> None:
        self._stream = stream
        self._sources = sources
        self._kept: tuple[str, list[Tensor]] | None = None
        self._keeping = Lock()

    def pieces(self, parameter: str, dtype: torch.dtype) -> Iterator[Tensor]:
        """All rows in order, in pieces of about `PIECE_BYTES`; stacked matrices follow one another.

        Raises:
            ValueError: See `rows`.
        """

        def read(place: tuple[int, int, int]) -> Tensor:
            return self.rows(parameter, dtype, *place)

        return map_in_order(read, self._places(parameter, dtype))

    def rows(self, parameter: str, dtype: torch.dtype, matrix: int, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of a parameter, or of one of its stacked matrices, contiguous.

        Raises:
            ValueError: A value of the checkpoint is not finite, or overflows `dtype`.
        """
        return self._cut(parameter, dtype, matrix, 0, start, stop)

    def columns(self, parameter: str, dtype: torch.dtype, matrix: int, start: int, stop: int) -> Tensor:
        """Columns `start` to `stop` of the same, contiguous.

        Raises:
            ValueError: See `rows`.
        """
        return self._cut(parameter, dtype, matrix, 1, start, stop)

    def piece_rows(self, parameter: str, dtype: torch.dtype) -> int:
        """How many rows a piece has."""
        source = self._sources[parameter]
        _, *rest = self._shape(source)
        return max(1, PIECE_BYTES // (max(dtype.itemsize, 4) * math.prod(rest)))

    def _places(self, parameter: str, dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
        source, step = self._sources[parameter], self.piece_rows(parameter, dtype)
        count = self._shape(source)[0]
        for matrix in range(len(source.names)):
            for start in range(0, count, step):
                yield matrix, start, min(start + step, count)

    def _shape(self, source: WeightSource) -> tuple[int, ...]:
        """Shape of one matrix in the graphs."""
        shape = list(self._stream.spec(source.names[0]).shape)
        if source.ranges:
            shape[source.axis] = sum(stop - start for start, stop in source.ranges)
        return tuple(reversed(shape) if source.transpose else shape)

    def _cut(
        self, parameter: str, dtype: torch.dtype, matrix: int, axis: int, start: int, stop: int
    ) -> Tensor:
        source = self._sources[parameter]
        stored = self._stored(
            source, source.names[matrix], 1 - axis if source.transpose else axis, start, stop
        )
        shifted = stored if source.add == 0 else stored.to(torch.float32) + source.add
        # What is cut out is copied before it is turned: torch turns a whole matrix about five times as fast as part of
        # a larger one.
        turned = shifted.contiguous().T if source.transpose else shifted
        converted = turned.to(dtype).contiguous()
        _require_range(parameter, shifted, converted)
        return converted

    def _stored(self, source: WeightSource, name: str, axis: int, start: int, stop: int) -> Tensor:
        """Entries `start` to `stop` along an axis of what a parameter takes of a tensor, as the checkpoint has them."""
        shape = self._stream.spec(name).shape
        taken: list[Ranges] = [((0, size),) for size in shape]
        if source.ranges:
            taken[source.axis] = source.ranges
        taken[axis] = cut_ranges(taken[axis], start, stop)
        if axis == 0:
            rows = [self._stream.read_rows(name, *part) for part in taken[0]]
        else:
            rows = list(_overlaps(self._whole(name), taken[0]))
        if len(shape) > 1 and tuple(taken[1]) != ((0, shape[1]),):
            rows = [_joined([part[:, low:high] for low, high in taken[1]], 1) for part in rows]
        return _joined(rows, 0)

    def _whole(self, name: str) -> list[Tensor]:
        """A tensor in slabs of rows."""
        with self._keeping:
            if self._kept is None or self._kept[0] != name:
                self._kept = None
                spec = self._stream.spec(name)
                count = spec.shape[0]
                step = max(1, _SLAB_BYTES * count // max(spec.nbytes, 1))
                starts = range(0, count, step)
                slabs = map_in_order(
                    lambda first: self._stream.read_rows(name, first, min(first + step, count)), starts
                )
                self._kept = (name, list(slabs))
            return self._kept[1]


def cut_ranges(ranges: Ranges, start: int, stop: int) -> list[tuple[int, int]]:
    """Where entries `start` to `stop` of some ranges lie, which follow one another."""
    found, first = [], 0
    for low, high in ranges:
        begin, end = max(start - first, 0), min(stop - first, high - low)
        if begin < end:
            found.append((low + begin, low + end))
        first += high - low
    return found


def _overlaps(slabs: Sequence[Tensor], ranges: Ranges) -> Iterator[Tensor]:
    """The rows of some ranges, from slabs that follow one another."""
    for low, high in ranges:
        first = 0
        for slab in slabs:
            if low < first + len(slab) and first < high:
                yield slab[max(low - first, 0) : high - first]
            first += len(slab)


def _joined(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), axis)


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
