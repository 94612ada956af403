"""What `Cache.gather_rows` has to copy, the same for every runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvgraph.runtime.session import Cache, Ids


@dataclass(frozen=True, slots=True)
class Move:
    """Slots `start` to `stop` of row `source`, which go to the same slots of row `row`."""

    row: int
    source: int
    start: int
    stop: int


def plan_moves(cache: Cache, source: Cache, rows: Ids, start: Ids, stop: Ids) -> list[Move]:
    """The moves that change something, for arguments as `Cache.gather_rows` takes them.

    Raises:
        ValueError: An array does not have a number a row, or a row or a slot is out of its range.
    """
    size, limit = cache.batch_size, min(cache.limit, source.limit)
    for name, values in (("rows", rows), ("start", start), ("stop", stop)):
        if np.shape(values) != (size,):
            raise ValueError(
                f"{name} has shape {list(np.shape(values))}, expected [{size}], a number for each row"
            )
    moves = []
    for row, (origin, first, last) in enumerate(
        zip(rows.tolist(), start.tolist(), stop.tolist(), strict=True)
    ):
        if not 0 <= origin < source.batch_size:
            raise ValueError(f"rows[{row}] is {origin}, expected 0 <= row < {source.batch_size}")
        if not 0 <= first <= last <= limit:
            raise ValueError(
                f"row {row} takes slots {first} to {last}, expected 0 <= start <= stop <= {limit}, the cache's limit"
            )
        if first < last and not (cache is source and origin == row):
            moves.append(Move(row, origin, first, last))
    return moves


def overwrites_a_source(moves: Sequence[Move]) -> bool:
    """Whether, within one cache, a row is written that another move still has to read."""
    return not {move.row for move in moves}.isdisjoint(move.source for move in moves)
