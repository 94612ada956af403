"""What importing a part of kvgraph loads: a deployed machine has no torch, and needs none."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import kvgraph.runtime

ABSENT_WHEN_DEPLOYED = {"onnx", "onnx_ir", "onnxscript", "safetensors", "torch", "transformers"}
# Chosen when a bundle is opened, so that the others need not be installed.
RUNTIMES = {"cuda", "onnxruntime", "tensorrt", "tensorrt_rtx_bindings"}

# The compiled operators are a library for ONNX Runtime, which Python finds by its name and cannot import.
RUNTIME_MODULES = ["kvgraph.runtime"] + [
    module.name
    for module in pkgutil.walk_packages(kvgraph.runtime.__path__, "kvgraph.runtime.")
    if module.name != "kvgraph.runtime.kernels._operators"
]


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("package", ["kvgraph", "kvgraph.runtime"])
def test_package_loads_no_runtime(package: str) -> None:
    assert loaded_by(f"import {package}") & {*ABSENT_WHEN_DEPLOYED, *RUNTIMES} == set()


@pytest.mark.parametrize("module", [*RUNTIME_MODULES, "kvgraph.export.contract", "kvgraph.export.bundle"])
def test_module_of_a_deployed_machine_loads_no_export_package(module: str) -> None:
    assert loaded_by(f"import {module}") & ABSENT_WHEN_DEPLOYED == set()


def test_loaded_packages_include_those_imported_indirectly() -> None:
    assert "onnxruntime" in loaded_by("from onnxruntime.capi import _pybind_state")


@pytest.mark.parametrize("module", ["kvgraph.quant.quantizer", "kvgraph.export.targets.ort_cpu"])
def test_what_reads_bundles_alone_starts_without_torch(module: str) -> None:
    assert loaded_by(f"import {module}") & {"onnxscript", "torch"} == set()
