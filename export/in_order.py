"""Work on several cores, its results in the order of its items.

NumPy, hashing and files leave the interpreter to other threads while they work, so threads are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from kvgraph.runtime.machine import core_count

# Freed arrays that the allocator may keep for the next ones, in bytes, for every thread.
_KEPT_BYTES = 32 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """`function` of every item, in order, on all cores.

    Items are taken as they are needed, so that no more than two a core are in memory, whatever their number. The first
    error in the order of the items is raised, and what is not begun by then is left out.
    """
    threads = core_count()
    if threads == 1:
        yield from map(function, items)
        return
    _keep_freed_memory()
    pool = ThreadPoolExecutor(threads)
    begun: deque[Future[Result]] = deque()
    try:
        for item in items:
            begun.append(pool.submit(function, item))
            if len(begun) == 2 * threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _keep_freed_memory() -> None:
    """Let the allocator keep what is freed between one step of the work and the next.

    glibc hands back to the kernel what exceeds twice the largest mapped block that was freed so far, and each page of
    it is made anew then. Measured: a third of the time of a chain of NumPy operations on arrays of 1 MB.
    """
    np.empty(_KEPT_BYTES // 2, np.uint8)


def do_all(function: Callable[[Item], None], items: Iterable[Item]) -> None:
    """Call `function` with every item, on all cores; raises as `map_in_order` does."""
    for _ in map_in_order(function, items):
        pass
