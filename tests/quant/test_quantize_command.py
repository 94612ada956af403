"""`kvgraph quantize` and what it prints."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.quant.report import format_quantization


def test_quantizes_and_says_what_it_did(
    tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert main(["quantize", str(tiny.path), "-o", str(output), "--recipe", "int4-wo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["module", "graphs", "weight", "input", "count"]
    row = next(line for line in lines if line.startswith("model.layers.{i}.mlp.up_proj"))
    assert row.split()[1:6] == ["both", "int4", "block", "32", "float"]
    assert "left float: lm_head             the recipe keeps it" in lines
    assert [line for line in lines if line.startswith("worst module")]
    assert lines[-1].startswith(f"{output}: int4-wo, ")


def test_explains_every_module(tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--recipe", "prefill=int8-dynamic,decode=int4-wo", "--explain"]
    assert main(["quantize", str(tiny.path), "-o", str(tmp_path / "out"), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("model.layers.1.mlp.up_proj")]
    assert [(row[1], row[2]) for row in rows] == [("prefill", "int8"), ("decode", "int4")]
    least, median, most = (float(number) for number in rows[0][6:9])
    assert 0 < least < median < most


@pytest.mark.parametrize("value", [0x3F, 0xFF], ids=["another number", "no number"])
def test_changed_bundle_is_refused(
    value: int, tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hash is what is reported, also where what was changed cannot be rounded."""
    source = tmp_path / "source"
    shutil.copytree(tiny.path, source)
    content = bytearray((source / WEIGHTS_FILE).read_bytes())
    content[-4:] = bytes([value] * 4)
    (source / WEIGHTS_FILE).write_bytes(content)
    assert main(["quantize", str(source), "-o", str(tmp_path / "out"), "--recipe", "int8-wo"]) == 2
    assert "the file was changed, export again" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_writes_a_picture(tiny: Bundle, tmp_path: Path) -> None:
    picture = tmp_path / "errors.png"
    arguments = ["--recipe", "int8-wo", "--plot", str(picture)]
    assert main(["quantize", str(tiny.path), "-o", str(tmp_path / "out"), *arguments]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "int3"], "recipe 'int3' is not known; known are fp8"),
        (["--recipe", "fp8"], "has no scale for its input; give --calibration FILE"),
        (["--recipe", "int8-wo", "--evaluation", "absent.txt"], "absent.txt: No such file"),
        (["--recipe", "int8-sq"], "smooth_quant needs data; give --calibration FILE"),
        (["--recipe", "int8-wo", "--kv-cache", "int8"], "kv_cache needs data; give --calibration FILE"),
        (["--recipe", "int8-wo", "--samples", "3"], "--samples is for --calibration FILE"),
        (["--recipe", "fp8", "--calibration", "absent.txt"], "absent.txt"),
    ],
)
def test_bad_input_is_one_line(
    tiny: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert main(["quantize", str(tiny.path), "-o", str(tmp_path / "out"), *arguments]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("kvgraph: error: ")
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("recipe", "band"), [("int8-dynamic", "int8"), ("fp8-wo", "int8"), ("int4-wo", "int4")]
)
def test_compare_knows_the_band_of_a_recipe(
    tiny: Bundle,
    quantized: Callable[[Bundle, str], Bundle],
    capsys: pytest.CaptureFixture[str],
    recipe: str,
    band: str,
) -> None:
    arguments = ["--against", str(tiny.path), "--prefill", "8", "--steps", "4"]
    assert main(["compare", str(quantized(tiny, recipe).path), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"band       {band}: ")]
    assert lines[-1].startswith("in band: 5 steps")


def test_float_bundle_has_nothing_to_show(tiny: Bundle) -> None:
    with pytest.raises(ValueError, match="is not quantized"):
        format_quantization(tiny)


def test_calibrates(
    stories: Bundle, shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (shared_data / "text" / "botchan_en.txt").read_text(encoding="utf-8-sig")
    (tmp_path / "novel.txt").write_text(text[2000:8000], encoding="utf-8")
    arguments = ["--recipe", "fp8", "--calibration", str(tmp_path / "novel.txt"), "--samples", "8"]
    evaluation = shared_data / "text" / "tinystories_sample_en.txt"
    arguments += ["--sequence-length", "64", "--kv-cache", "int8", "--evaluation", str(evaluation)]
    assert main(["quantize", str(stories.path), "-o", str(tmp_path / "out"), *arguments]) == 0
    bundle = Bundle.open(tmp_path / "out")
    assert {(tensor.form, tensor.dtype) for tensor in bundle.contract.state} == {("delta", "int8")}
    assert bundle.quantization is not None
    measured = bundle.quantization["evaluation"]
    assert measured["perplexity"] < 1.05 * measured["reference_perplexity"]
    assert "float8_e4m3fn tensor" in capsys.readouterr().out
