"""Damaged graphs, outputs that cannot be written and devices that are not there: one line that says how to go on."""

import shutil
from pathlib import Path

import pytest

from kvgraph.cli import main
from kvgraph.runtime import machine


@pytest.fixture(scope="module")
def bundle(repository, exported):
    return exported(repository / "tests" / "tiny_model" / "model").path


@pytest.fixture
def damaged(bundle, tmp_path):
    """A bundle whose decode.onnx has its size and another content."""
    copy = Path(shutil.copytree(bundle, tmp_path / "damaged"))
    size = (copy / "decode.onnx").stat().st_size
    (copy / "decode.onnx").write_bytes(b"\xff" * size)
    return copy


def error_of(capsys, *arguments):
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("kvgraph: error: ")
    return line


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--prompt", "a"],
        ["run", "--prompt", "a", "--verify"],
        ["build", "--target", "ort-cpu"],
        ["build", "--target", "tensorrt-rtx"],
        ["compare"],
        ["compare", "--layers"],
        ["inspect"],
        ["perplexity", "--text", "TEXT"],
        ["quantize", "--recipe", "int8-wo", "-o", "OUTPUT"],
    ],
)
def test_damaged_graph_is_one_line_with_its_name_and_a_way_out(damaged, tmp_path, capsys, command):
    (tmp_path / "text").write_text("Once upon a time", encoding="utf-8")
    words = {"TEXT": tmp_path / "text", "OUTPUT": tmp_path / "output"}
    error = error_of(capsys, command[0], damaged, *(words.get(word, word) for word in command[1:]))
    assert "decode.onnx" in error
    assert "export" in error


def test_output_inside_the_bundle_is_refused_before_any_work(bundle, capsys, monkeypatch):
    monkeypatch.setattr(
        "kvgraph.quant.quantizer.quantize_bundle", lambda *_, **__: pytest.fail("work was done")
    )
    for output, where in (
        (bundle / "int8", "inside"),
        (bundle / "a" / ".." / "b", "inside"),
        (bundle.parent, "around"),
    ):
        error = error_of(capsys, "quantize", bundle, "--recipe", "int8-wo", "-o", output, "--force")
        assert f"lies {where} the bundle to quantize" in error
    assert "is the bundle to quantize" in error_of(
        capsys, "quantize", bundle, "--recipe", "int8-wo", "-o", bundle
    )


@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--json"],
        ["bench", "--json"],
        ["quantize", "--recipe", "int8-wo", "-o", "/no/such/bundle", "--plot"],
    ],
)
def test_report_in_a_missing_folder_is_refused_before_any_work(bundle, capsys, command):
    error = error_of(capsys, command[0], bundle, *command[1:], "/no/such/report")
    assert "/no/such/report: its folder does not exist" in error


def test_missing_gpu_is_said(bundle, capsys, monkeypatch):
    monkeypatch.setattr(machine.ctypes, "CDLL", raise_os_error)
    error = error_of(capsys, "run", bundle, "--prompt", "a", "--device", "cuda")
    assert (
        "device cuda: there is no GPU, no NVIDIA driver (libcuda.so.1) is installed; run on the device cpu"
        in error
    )


def raise_os_error(name):
    raise OSError(name)
