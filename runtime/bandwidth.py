"""How fast memory can be read: what a decode step, which reads every weight once, is measured by."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.kernels import memory_reader
from kvgraph.runtime.machine import last_level_cache_bytes, memory_bytes
from kvgraph.runtime.resident_weights import large_pages

# Read in 15 to 20 ms by two cores, beside which starting the threads (0.1 ms) is little.
_SMALLEST_BUFFER = 512 << 20


def read_bandwidth(threads: int, buffer_bytes: int | None = None, repetitions: int = 5) -> float:
    """Bytes a second at which `threads` threads read memory, the best of several passes.

    It is meant as an upper bound of what a step can reach. Each thread reads a part of its own of one buffer in large
    pages, as weights lie, in two ways in turn: by a loop of the kernels' library that does nothing else, with the
    widest loads and the prefetching of the products, and by NumPy's sum of 64-bit integers, which is the only one
    without the library and on some processors slower than memory. A step may still exceed it where a cache keeps some
    of the weights from one step to the next.

    Args:
        threads: How many read at once.
        buffer_bytes: Size of the buffer; default: four times the last-level cache, at least 512 MiB, at most a quarter
            of the memory. It is read from end to end, which leaves nothing of its start in a cache that it exceeds.
        repetitions: Passes of each way.
    """
    if buffer_bytes is None:
        buffer_bytes = min(max(4 * last_level_cache_bytes(), _SMALLEST_BUFFER), memory_bytes() // 4)
    buffer = np.frombuffer(large_pages(buffer_bytes), np.int64)
    parts = np.array_split(buffer, threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        # Ones, not zeros: pages that were never written all read one page of zeros.
        list(pool.map(lambda part: part.fill(1), parts))
        for read in _ways() * repetitions:
            start = time.perf_counter()
            list(pool.map(read, parts))
            best_s = min(best_s, time.perf_counter() - start)
    return buffer.nbytes / best_s


def _ways() -> list[Callable[[NDArray[np.int64]], Any]]:
    """Functions of an array whose result depends on every byte; while they read, the interpreter lock is free."""
    read = memory_reader()
    return [np.sum] if read is None else [np.sum, lambda part: read(part.ctypes.data, part.nbytes)]
