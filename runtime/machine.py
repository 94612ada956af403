"""The machine that a measurement was made on: what it is, and how much of its memory is in use."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MIB = 1 << 20
_STATUS = Path("/proc/self/status")
_ROLLUP = Path("/proc/self/smaps_rollup")
# With these, products of bytes are summed in 32 bits.
_EXACT_INT8 = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def why_no_gpu() -> str | None:
    """Why CUDA has no device here, None if it has one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1) is installed"
    if (status := int(driver.cuInit(0))) != 0:
        return f"the NVIDIA driver does not start (cuInit gives {status})"
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value > 0 else "the NVIDIA driver sees no device"


@dataclass(frozen=True, slots=True)
class Machine:
    """What has to be known to repeat a measurement.

    Attributes:
        cpu: Model of the processor.
        cores: Cores that this process may use.
        memory_bytes: Memory of the machine.
        system: Operating system and architecture.
        python: Version of Python.
        numpy: Version of NumPy.
        load_average: Processes that wanted a core over the last minute; None where the system does not say.
    """

    cpu: str
    cores: int
    memory_bytes: int
    system: str
    python: str
    numpy: str
    load_average: float | None


def describe_machine() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu_model(),
        cores=core_count(),
        memory_bytes=memory_bytes(),
        system=platform.platform(),
        python=platform.python_version(),
        numpy=np.__version__,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def core_count() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident so far.

    Mapped files count as far as they are read, and once for each mapping: see `memory_in_use_bytes`.
    """
    try:
        status = _STATUS.read_text(encoding="utf-8")
    except OSError:
        status = ""
    if (found := re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)) is not None:
        return int(found[1]) * 1024
    # Not asked first: Linux hands this maximum on from the process that started this one.
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_in_use_bytes() -> int | None:
    """Memory of this process now, with a page of a file that is mapped twice counted once; None without procfs.

    Graphs that map one weights file each add it to the resident size; the machine holds it once. Pages that other
    processes map too count in part.
    """
    try:
        rollup = _ROLLUP.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^Pss:\s*(\d+) kB$", rollup, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def int8_products_saturate() -> bool:
    """Whether products of unsigned and signed bytes may saturate: on x86 without VNNI, or where that is not known."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    found = re.search(r"^flags\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found is None or _EXACT_INT8.isdisjoint(found[1].split())


def _cpu_model() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), re.MULTILINE)
    return found[1] if found is not None else platform.processor() or platform.machine()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def last_level_cache_bytes() -> int:
    """Size of the largest cache of the first core, 0 where the system does not say."""
    largest = 0
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM])", file.read_text(encoding="ascii").strip())
        if found is not None:
            largest = max(largest, int(found[1]) * (1024 if found[2] == "K" else _MIB))
    return largest
