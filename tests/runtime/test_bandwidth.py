"""The bandwidth of memory: that every byte is read once in a pass, and how fast that goes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest

from kvgraph.runtime import bandwidth, kernels

MIB = 1 << 20
NEEDS_LIBRARY = pytest.mark.skipif(
    kernels.library_path() is None, reason="kvgraph's CPU kernels are not compiled in this installation"
)


@pytest.fixture(params=["library", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(bandwidth, "memory_reader", lambda: None)
    elif kernels.library_path() is None:
        pytest.skip("kvgraph's CPU kernels are not compiled in this installation")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bandwidth_is_that_of_reading_every_byte(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))  # every pass takes a second
    assert bandwidth.read_bandwidth(threads, 4 * MIB, repetitions=2) == 4 * MIB


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_read_parts_that_make_up_the_buffer(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[tuple[int, int]] = []
    monkeypatch.setattr(bandwidth, "memory_reader", lambda: lambda at, size: parts.append((at, size)))
    bandwidth.read_bandwidth(threads, MIB, repetitions=1)
    parts.sort()
    assert len(parts) == threads
    assert sum(size for _, size in parts) == MIB
    assert all(at + size == following for (at, size), (following, _) in itertools.pairwise(parts))


@pytest.mark.usefixtures("way")
def test_bandwidth_is_of_the_order_of_a_single_reduction() -> None:
    buffer, times = np.ones(32 * MIB // 8, np.int64), []
    for _ in range(5):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    measured = bandwidth.read_bandwidth(1, buffer.nbytes)
    assert 0.1 < measured * min(times) / buffer.nbytes < 10  # other processes may come between


@NEEDS_LIBRARY
@pytest.mark.parametrize("name", ["amx-int8", "avx512-vnni", "avx2", "generic"])
@pytest.mark.parametrize("size", [0, 1, 8, 1023, 1024, 4096, 70_001])
def test_each_instruction_set_reads_every_byte(name: str, size: int, request: Any) -> None:
    before = kernels.instruction_set()
    assert before is not None
    if not kernels.choose_instruction_set(name):
        pytest.skip(f"this processor has no {name}")
    request.addfinalizer(lambda: kernels.choose_instruction_set(before))
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    words = np.zeros(-(-size // 8), np.uint64)
    words.view(np.uint8)[:size] = content
    read = kernels.memory_reader()
    assert read is not None
    assert read(content.ctypes.data, size) == int(np.bitwise_xor.reduce(words))
