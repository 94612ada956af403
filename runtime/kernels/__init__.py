"""The operators of the ort-cpu target, in C++: where the compiled library lies, and what it runs on.

Operators of the domain `kvgraph` in targets/ort-cpu; canonical graphs never hold them. Everything is float32 but the
weights, which one UINT8 tensor holds in panels of 16 output columns (`kvgraph.export.packed`), and caches, which may
be float16, or INT8 or E4M3 with a scale and an offset for each channel of a head.

| operator | inputs | result |
|---|---|---|
| `PackedLinear` | x [..., K], weights, bias [N], residual [..., M] | act(x W + bias) + residual, or act(gate) * up |
| `PackedGather` | weights, ids int64 [...] | columns of W, [..., K]: rows of a table stored as its tied head |
| `PackedExperts` | x, chosen int64 [..., k], shares [..., k], gate_up, down, residual | the sum of what they give |
| `CachedAttention` | qkv, past_length, past_key, past_value, cos, sin, q_norm, k_norm | attention over the cache |

Each has kernels for AMX, for AVX-512 with VNNI, for AVX2, and for any other processor; the library takes the best.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_NAME = "_operators"


def library_path() -> Path | None:
    """The shared library of operators, None where there was no C++ compiler to make it."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(_NAME + suffix)
        if path.is_file():
            return path
    return None


def instruction_set() -> str | None:
    """What the operators use here: "amx-int8", "avx512-vnni", "avx2" or "generic"; None without the library."""
    path = library_path()
    if path is None:
        return None
    name = ctypes.CDLL(str(path)).kvgraph_instruction_set
    name.restype = ctypes.c_char_p
    return str(name().decode())


def choose_instruction_set(name: str) -> bool:
    """Use another one from now on, in every session of this process; False where the processor lacks it."""
    path = library_path()
    return path is not None and bool(ctypes.CDLL(str(path)).kvgraph_choose_instruction_set(name.encode()))


@functools.cache
def memory_reader() -> Callable[[int, int], int] | None:
    """A function of an address and a number of bytes that reads them and does little else; None without the library.

    It gives the exclusive or of their 64-bit words, the last one filled up with zeros.
    """
    path = library_path()
    if path is None:
        return None
    read = ctypes.CDLL(str(path)).kvgraph_read_memory
    read.argtypes, read.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_uint64
    return read
