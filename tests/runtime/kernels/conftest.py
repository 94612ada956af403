"""Graphs of one operator, on each instruction set that this processor has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from kvgraph.runtime import kernels

SETS = ("amx-int8", "avx512-vnni", "avx2", "generic")


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The operators use this instruction set for the length of a test."""
    if kernels.library_path() is None:
        pytest.skip("the operators were not compiled: there was no C++ compiler")
    before = kernels.instruction_set()
    assert before is not None
    if not kernels.choose_instruction_set(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    kernels.choose_instruction_set(before)


@pytest.fixture(scope="session")
def layouts(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """`layouts.py`: packed weights, written from the description of their layouts."""
    return load_module(Path(__file__).with_name("layouts.py"))


@pytest.fixture(scope="session")
def run() -> Callable[..., list[np.ndarray]]:
    """`run(operator, inputs, outputs, **attributes)`: what one node gives for its inputs in order, None for none."""
    if kernels.library_path() is None:
        pytest.skip("the operators were not compiled: there was no C++ compiler")
    return _run


def _run(
    operator: str, inputs: dict[str, np.ndarray | None], outputs: int, **attributes: Any
) -> list[np.ndarray]:
    import onnxruntime

    types = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "uint8": TensorProto.UINT8}
    given = {name: array for name, array in inputs.items() if array is not None}
    node = helper.make_node(
        operator,
        ["" if array is None else name for name, array in inputs.items()],
        [f"output_{i}" for i in range(outputs)],
        domain="kvgraph",
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info(n, types[str(a.dtype)], a.shape) for n, a in given.items()],
        [helper.make_tensor_value_info(f"output_{i}", TensorProto.FLOAT, None) for i in range(outputs)],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvgraph", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(kernels.library_path()))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    results: list[np.ndarray] = session.run(None, given)
    return results
