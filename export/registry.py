"""torch's table of ONNX functions, made once a process.

`torch.onnx.export` makes it anew in every call, by parsing the source of some five hundred functions: a third of the
time that tracing a small piece of a model takes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager

try:
    from torch.onnx._internal.exporter._registration import ONNXRegistry
except ImportError:  # not a public name: a torch that moved it makes its table in every call
    _make = None
else:
    _make = ONNXRegistry.from_torchlib


@contextmanager
def one_registry() -> Iterator[None]:
    """Let `torch.onnx.export` take a copy of the table that the first call made."""
    if _make is None:
        yield
        return
    ONNXRegistry.from_torchlib = staticmethod(_copied)  # type: ignore[method-assign, assignment]  # put back below
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = _make  # type: ignore[method-assign]


@functools.cache
def _registry(opset_version: int) -> ONNXRegistry:
    assert _make is not None
    return _make(opset_version=opset_version)


def _copied(opset_version: int) -> ONNXRegistry:
    """A table to which a caller may add functions of its own."""
    registry = copy.copy(_registry(opset_version))
    registry.functions = {target: list(functions) for target, functions in registry.functions.items()}
    return registry
