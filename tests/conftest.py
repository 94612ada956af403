"""What tests of several folders share: where things lie, and whether there is a GPU."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real models, tokenizers and texts beside the repository, which are not part of it."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("../shared/data is absent")
    return path


@functools.cache
def why_no_gpu() -> str | None:
    """Why the NVIDIA driver has no device to offer, or None if it has one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 is absent"
    if (status := driver.cuInit(0)) != 0:
        return f"the NVIDIA driver does not start: cuInit returned {status}"
    count = ctypes.c_int(0)
    if (status := driver.cuDeviceGetCount(ctypes.byref(count))) != 0:
        return f"the NVIDIA driver counts no devices: cuDeviceGetCount returned {status}"
    return None if count.value > 0 else "the NVIDIA driver sees no device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and (reason := why_no_gpu()) is not None:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))
