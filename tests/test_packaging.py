"""The wheel holds what the repository holds, and installs what the commands need.

setuptools leaves a package that pyproject.toml does not list out of the wheel without a word, and the editable
install that the other tests run on would not show it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.runtime.kernels import instruction_set, library_path

STAGES = ("export", "models", "quant", "runtime")
METADATA_FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def pyproject(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, built from a copy so that nothing stale is packed and nothing is left behind."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("kvgraph", *STAGES):
        shutil.copytree(repository / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in METADATA_FILES:
        shutil.copy(repository / name, source)
    output = tmp_path_factory.mktemp("wheel")
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(output), str(source))
    (path,) = output.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel."""
    target = tmp_path_factory.mktemp("installed")
    run_python(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)
    )
    return target


def run_python(*arguments: str, path: tuple[Path | str, ...] = ()) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_installed(installed: Path, code: str) -> str:
    # -S leaves the editable install's import hook out, and the dependencies with it: they come back by their path.
    return run_python("-S", "-P", "-c", code, path=(installed, sysconfig.get_path("purelib")))


def files_on_disk(repository: Path) -> set[str]:
    """Every module, recipe and marker file, under the name that it has inside the package."""
    roots = {"kvgraph": repository / "kvgraph"} | {f"kvgraph/{name}": repository / name for name in STAGES}
    return {
        f"{package}/{path.relative_to(root).as_posix()}"
        for package, root in roots.items()
        for path in root.rglob("*")
        if path.suffix in (".py", ".toml") or path.name == "py.typed"
    }


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in requirements}


def test_listed_packages_are_those_on_disk(repository: Path, pyproject: dict[str, Any]) -> None:
    on_disk = {
        name.removesuffix("/__init__.py").replace("/", ".")
        for name in files_on_disk(repository)
        if name.endswith("/__init__.py")
    }

    assert set(pyproject["tool"]["setuptools"]["packages"]) == on_disk


def test_every_folder_with_a_module_is_a_package(repository: Path) -> None:
    names = {name for name in files_on_disk(repository) if name.endswith(".py")}

    folders = {name.rpartition("/")[0] for name in names}
    assert {folder for folder in folders if f"{folder}/__init__.py" not in names} == set()


def test_wheel_holds_every_module_recipe_and_the_type_marker(repository: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}

    libraries = {name for name in packed if name.startswith("kvgraph/runtime/kernels/_operators.")}
    assert packed - libraries == files_on_disk(repository)
    assert len(libraries) == (1 if library_path() else 0)


def test_source_distribution_holds_what_the_operators_are_compiled_from(
    repository: Path, pyproject: dict[str, Any]
) -> None:
    (extension,) = pyproject["tool"]["setuptools"]["ext-modules"]
    folder = repository / "runtime" / "kernels"
    on_disk = {f"runtime/kernels/{path.name}" for path in folder.iterdir() if path.suffix in (".cpp", ".h")}

    assert {*extension["sources"], *extension["depends"]} == on_disk


def test_wheel_holds_the_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]


def test_installed_wheel_runs_without_the_repository(installed: Path) -> None:
    origin = run_installed(
        installed,
        "import kvgraph.runtime, kvgraph.models, kvgraph.quant, kvgraph.export.contract as c; print(c.__file__)",
    )

    assert Path(origin.strip()).is_relative_to(installed)


def test_installed_command_starts(installed: Path) -> None:
    script = installed / "bin" / "kvgraph"

    printed = run_python("-S", "-P", str(script), "--version", path=(installed,))

    kernels = instruction_set() or "none, no C++ compiler at installation"
    assert printed == f"kvgraph {kvgraph.__version__} (CPU kernels: {kernels})\n"


def test_version_is_the_same_in_code_and_metadata(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["version"] == kvgraph.__version__


def test_python_floor_is_what_the_checkers_assume(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["requires-python"] == ">=3.11"
    assert pyproject["tool"]["mypy"]["python_version"] == "3.11"
    assert pyproject["tool"]["ruff"]["target-version"] == "py311"


def test_no_extra_brings_two_builds_of_onnx_runtime(pyproject: dict[str, Any]) -> None:
    # They install the same package and overwrite each other; the user chooses one.
    builds = {"onnxruntime", "onnxruntime-gpu"}
    groups = {"": pyproject["project"]["dependencies"]} | pyproject["project"]["optional-dependencies"]

    brought = {name: requirement_names(group) & builds for name, group in groups.items()}

    assert {name: found for name, found in brought.items() if found} == {
        "cpu": {"onnxruntime"},
        "gpu": {"onnxruntime-gpu"},
    }


def test_base_install_is_light(pyproject: dict[str, Any]) -> None:
    assert requirement_names(pyproject["project"]["dependencies"]) == {
        "jinja2",
        "numpy",
        "tokenizers",
        "tqdm",
    }
