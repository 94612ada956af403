from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from typing import Any, get_type_hints

import pytest

from kvgraph.runtime import tensorrt_api
from kvgraph.runtime.tensorrt_module import collect_messages, dtype_names, load_tensorrt

# Protocol -> class of the bindings.
BINDINGS = {
    "Tensor": "ITensor",
    "Layer": "ILayer",
    "Network": "INetworkDefinition",
    "ParserError": "ParserError",
    "OnnxParser": "OnnxParser",
    "OptimizationProfile": "IOptimizationProfile",
    "BuilderConfig": "IBuilderConfig",
    "Builder": "Builder",
    "ExecutionContext": "IExecutionContext",
    "RuntimeConfig": "IRuntimeConfig",
    "Engine": "ICudaEngine",
    "Runtime": "Runtime",
}


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_tensorrt("tensorrt-rtx")


def methods(protocol: type) -> dict[str, Any]:
    return {
        name: value for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"
    }


def test_every_protocol_is_compared() -> None:
    protocols = {
        name
        for name, value in vars(tensorrt_api).items()
        if inspect.isclass(value) and value.__module__ == tensorrt_api.__name__
    }
    assert protocols == {*BINDINGS, "TensorRT"}


@pytest.mark.parametrize("name", BINDINGS)
def test_bindings_have_every_member(trt: Any, name: str) -> None:
    protocol, binding = getattr(tensorrt_api, name), getattr(trt, BINDINGS[name])
    members = {*methods(protocol), *vars(protocol).get("__annotations__", {})}
    assert not {member for member in members if not hasattr(binding, member)}


@pytest.mark.parametrize("name", BINDINGS)
def test_bindings_take_these_arguments(trt: Any, name: str) -> None:
    protocol, binding = getattr(tensorrt_api, name), getattr(trt, BINDINGS[name])
    for method, function in methods(protocol).items():
        parameters = list(inspect.signature(function).parameters)[1:]
        # pybind11 writes each overload's signature into the docstring.
        overloads = re.findall(rf"{method}\(self: [^,)]+(.*?)\) ->", getattr(binding, method).__doc__)
        accepted = [
            re.findall(r"[(,] ?(\w+):", overload.replace("collections.abc.", "")) for overload in overloads
        ]
        assert parameters in accepted, f"{method}: {parameters} is none of {accepted}"


def test_module_has_every_member(trt: Any) -> None:
    members = {*methods(tensorrt_api.TensorRT), *get_type_hints(tensorrt_api.TensorRT)}
    assert not {member for member in members if not hasattr(trt, member)}


def test_element_types_are_named_as_in_the_contract(trt: Any) -> None:
    assert dtype_names(trt)[trt.DataType.HALF] == "float16"
    assert dtype_names(trt)[trt.DataType.BF16] == "bfloat16"


def test_messages_are_kept_and_not_printed(trt: Any, capfd: pytest.CaptureFixture[str]) -> None:
    log: Any = collect_messages(trt)
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert not parser.parse(b"not a model")
    assert any("Failed to parse the ONNX model" in message for message in log.errors())
    assert capfd.readouterr() == ("", "")


def test_an_unknown_flavour_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="'trt', expected one of tensorrt-rtx, tensorrt"):
        load_tensorrt("trt")


@pytest.mark.parametrize(
    ("flavour", "module"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx_bindings")]
)
def test_a_missing_flavour_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, flavour: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{flavour} needs the package {module}; install kvgraph\[\w+\]"):
        load_tensorrt(flavour)


def test_missing_libraries_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"needs the package onnxruntime_ep_nv_tensorrt_rtx; install kvgraph\[rtx\]"
    ):
        load_tensorrt("tensorrt-rtx")
