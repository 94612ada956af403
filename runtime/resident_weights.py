"""A target's weights in memory of its own, in large pages.

A decode step reads every weight once, so it is as fast as memory only if finding a page costs nothing. Pages of a
mapped file are 4 KiB, and looking one up takes about as long as reading it: on a virtual machine, steps from memory in
pages of 2 MiB took 18% less time (1B shape, 4 bits). The copy is the only one: graphs share it, ONNX Runtime uses it
where it lies, and no page of the file stays mapped.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvgraph.runtime.machine import core_count

WEIGHTS_FILE = "weights.safetensors"
_PIECE_BYTES = 32 << 20


def load_weights(path: Path) -> Mapping[str, Any]:
    """Name -> OrtValue uint8 [bytes] of every packed weight of a target's weights file.

    Args:
        path: A safetensors file whose metadata gives the length of each packed weight.

    Raises:
        ValueError: The file is shorter than its header says.
    """
    from onnxruntime import OrtValue

    memory = _read(path)
    head = int.from_bytes(memory[:8].tobytes(), "little")
    header = json.loads(memory[8 : 8 + head].tobytes())
    values: dict[str, Any] = {}
    for name, length in header.get("__metadata__", {}).items():
        start = 8 + head + header[name]["data_offsets"][0]
        part = memory[start : start + int(length)]
        if part.size != int(length):
            raise ValueError(
                f"{path}: {name!r} has {part.size} bytes, expected {length}; build the target again"
            )
        values[name] = OrtValue.ortvalue_from_numpy(part)
    return values


def _read(path: Path) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The whole file, in pages as large as the system gives."""
    size = path.stat().st_size
    buffer = large_pages(size)
    view = memoryview(buffer)
    with path.open("rb") as file, ThreadPoolExecutor(core_count()) as pool:
        descriptor = file.fileno()

        def fill(start: int) -> None:
            end = min(size, start + _PIECE_BYTES)
            while start < end:
                count = os.preadv(descriptor, [view[start:end]], start)
                if count == 0:
                    raise ValueError(f"{path}: ends at byte {start}, expected {size}; build the target again")
                start += count

        list(pool.map(fill, range(0, size, _PIECE_BYTES)))
    return np.frombuffer(buffer, np.uint8)


def large_pages(size: int) -> mmap.mmap:
    """Memory of this process alone: of shared memory Linux makes no large pages unless an administrator allows it."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
