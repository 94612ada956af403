"""The machine of a measurement and its memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvgraph.runtime import machine

MIB = 1 << 20


def test_peak_memory_grows_with_what_is_touched_and_does_not_fall() -> None:
    # In a process of its own: what other tests have touched would hide the growth.
    code = (
        "import numpy as np; from kvgraph.runtime.machine import peak_memory_bytes as peak\n"
        "before = peak(); block = np.ones(64 << 20, np.uint8); after = peak(); del block\n"
        "print(after - before, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Linux counts resident pages a few at a time.
    assert [int(growth) for growth in done.stdout.split()] == pytest.approx([64 * MIB] * 2, rel=0.1)


def test_peak_memory_without_procfs_is_that_of_getrusage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "absent")
    unit = 1 if sys.platform == "darwin" else 1024
    assert machine.peak_memory_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no procfs")
def test_file_that_is_mapped_twice_is_in_use_once(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(32 * MIB))
    code = (
        "import sys, numpy as np; from kvgraph.runtime import machine\n"
        "used, peak = machine.memory_in_use_bytes(), machine.peak_memory_bytes()\n"
        "maps = [np.memmap(sys.argv[1], mode='r') for _ in range(2)]; [int(array.sum()) for array in maps]\n"
        "print(machine.memory_in_use_bytes() - used, machine.peak_memory_bytes() - peak)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    in_use, resident = map(int, done.stdout.split())
    assert in_use == pytest.approx(32 * MIB, rel=0.1)
    assert resident == pytest.approx(2 * 32 * MIB, rel=0.1)


def test_memory_in_use_is_unknown_without_procfs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_ROLLUP", tmp_path / "absent")
    assert machine.memory_in_use_bytes() is None


def test_machine_is_described() -> None:
    found = machine.describe_machine()
    assert found.cpu
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.memory_bytes > 100 * MIB
    assert found.numpy == np.__version__


@pytest.mark.parametrize(
    ("flags", "saturates"),
    [
        ("fpu avx2", True),
        ("fpu avx2 avx_vnni", False),
        ("avx512_vnni", False),
        ("amx_int8", False),
        (None, True),
    ],
)
def test_int8_products_saturate_on_x86_without_vnni(
    monkeypatch: pytest.MonkeyPatch, flags: str | None, saturates: bool
) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "_cpuinfo", lambda: "" if flags is None else f"flags\t\t: {flags}\n")
    assert machine.int8_products_saturate() is saturates


def test_int8_products_are_exact_on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert not machine.int8_products_saturate()
