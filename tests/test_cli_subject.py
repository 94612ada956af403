"""Reports name what was loaded: the bundle, its recipe and the target."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest

from kvgraph import cli
from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.ort_cpu import build_ort_cpu
from kvgraph.quant.plan import parse_plan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.runtime.kernels import instruction_set, library_path

CANONICAL = f"onnxruntime {onnxruntime.__version__} on cpu, float32 cache"


@pytest.fixture(scope="module")
def built(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """A quantized bundle with a target of ONNX Runtime's own operators."""
    output = tmp_path_factory.mktemp("subject") / "tiny-int8"
    bundle = quantize_bundle(exported(tiny_llama()), parse_plan("int8-wo"), output)
    build_ort_cpu(bundle, "onnxruntime")
    return bundle


def run(bundle: Bundle, *arguments: str) -> int:
    return cli.main(["run", str(bundle.path), "--token-ids", "5,6", "--max-new-tokens", "2", *arguments])


@pytest.mark.parametrize(("arguments", "target"), [((), ""), (("--target", "ort-cpu"), ", target ort-cpu")])
def test_run_names_recipe_and_target(
    built: Bundle, arguments: tuple[str, ...], target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(built, *arguments) == 0
    assert capsys.readouterr().err.splitlines()[0] == f"{built.path} (int8-wo){target}: {CANONICAL}"


def test_run_names_the_kernels_of_a_target(
    exported: Callable[..., Bundle],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if library_path() is None:
        pytest.skip("there was no C++ compiler at installation")
    bundle = Bundle.open(shutil.copytree(exported(tiny_llama()).path, tmp_path / "bundle"))
    build_ort_cpu(bundle)
    assert run(bundle, "--target", "ort-cpu") == 0
    title = CANONICAL.replace(" on cpu", f" on cpu, {instruction_set()} kernels")
    assert capsys.readouterr().err.splitlines()[0] == f"{bundle.path}, target ort-cpu: {title}"


def test_compare_tells_a_target_from_its_bundle(built: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(built.path)
    flags = ["--against", path, "--target", "ort-cpu", "--prefill", "4", "--steps", "2"]
    for layers in ([], ["--layers"]):
        assert cli.main(["compare", path, *flags, *layers]) == 0
        reference, candidate, *_ = capsys.readouterr().out.splitlines()
        assert reference == f"reference  {CANONICAL}: {path} (int8-wo)"
        assert candidate == f"candidate  {CANONICAL}: {path} (int8-wo), target ort-cpu"


def test_recipes_of_two_graphs_are_named_as_on_the_command_line(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    name = "prefill=int8-dynamic,decode=int4-wo"
    assert quantize_bundle(exported(tiny_llama()), parse_plan(name), tmp_path / "out").recipe_name == name
    assert exported(tiny_llama()).recipe_name is None
