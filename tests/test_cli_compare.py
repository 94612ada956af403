"""`kvgraph compare` from end to end, with PyTorch and with another bundle as the reference."""

from __future__ import annotations

import json
import shutil

import pytest

from kvgraph import cli
from kvgraph.export.targets.ort_cpu import build_ort_cpu


@pytest.fixture(scope="module")
def bundle(tiny_llama, exported):
    return exported(tiny_llama())


def compare(*arguments):
    return cli.main(["compare", "--prefill", "6", "--steps", "5", *map(str, arguments)])


def test_a_bundle_is_in_band_with_the_checkpoint_it_was_exported_from(bundle, capsys):
    assert compare(bundle.path) == 0
    out = capsys.readouterr().out
    assert "reference  torch" in out
    # Three rows of 11, 5 and 2 random ids: this model has no tokenizer.
    assert "in band: 6 steps, 18 tokens" in out.splitlines()[-1]


def test_another_checkpoint_is_out_of_band_and_the_layer_is_named(bundle, tiny_llama, capsys):
    # The same weights with another epsilon: the embedding is right, what leaves the first layer is not.
    other = tiny_llama(rms_norm_eps=0.1)
    assert compare(bundle.path, "--checkpoint", other, "--layers") == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith(
        "OUT OF BAND: 6 of 6 steps; first step 0 (prefill, position 0), first cache layer 0"
    )
    assert "first hidden state layer 0" in verdict


def test_a_bundle_is_compared_with_another_one(bundle, tmp_path, capsys):
    moved = tmp_path / "a copy"
    shutil.copytree(bundle.path, moved)
    assert compare(bundle.path, "--against", moved, "--layers", "--prefill-chunk", "4") == 0
    out = capsys.readouterr().out
    assert f"cache: {moved}" in out
    assert "max error 0, KL 0" in out


def test_targets_are_compared_with_each_other(tiny_llama, exported, capsys):
    """ONNX Runtime has no bfloat16 on a CPU: neither bundle runs by its own graphs there."""
    narrow = exported(tiny_llama(), dtype="bfloat16")
    build_ort_cpu(narrow)
    assert compare(narrow.path, "--target", "ort-cpu", "--against", narrow.path) == 2
    assert "bfloat16" in capsys.readouterr().err
    targets = ("--target", "ort-cpu", "--against-target", "ort-cpu")
    assert compare(narrow.path, *targets, "--against", narrow.path) == 0
    assert "max error 0, KL 0" in capsys.readouterr().out


def test_report_picture_and_polygraphy_files_are_written(bundle, tmp_path, capsys):
    files = [tmp_path / name for name in ("report.json", "errors.png", "steps")]
    flags = ("--json", files[0], "--plot", files[1], "--save-polygraphy", files[2])
    assert compare(bundle.path, *flags) == 0
    report = json.loads(files[0].read_text())
    assert report["in_band"] is True
    assert len(report["steps"]) == 6
    assert report["candidate"]["runtime"] == "onnxruntime"
    assert files[1].stat().st_size > 10_000
    assert "steps 0, 1, 5" in capsys.readouterr().out
    assert len((files[2] / "commands.txt").read_text().splitlines()) == 2


def test_a_text_is_compared_over_its_first_tokens(shared_data, exported, capsys):
    bundle = exported(shared_data / "stories260k")
    text = shared_data / "text" / "tinystories_sample_en.txt"
    assert (
        cli.main(["compare", str(bundle.path), "--text", str(text), "--prefill", "380", "--steps", "20"]) == 0
    )
    assert "in band: 21 steps, 400 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--checkpoint", "/no/such/checkpoint"), "/no/such/checkpoint"),
        (("--against", "/no/such/bundle"), "/no/such/bundle: no such bundle"),
        (("--target", "tensorrt"), "no target 'tensorrt'"),
        (("--text", "/no/such/text"), "kvgraph: error"),
        (("--prefill", "0"), "--prefill is 0"),
        (("--json", "/no/such/report.json"), "/no/such/report.json: its folder does not exist"),
        (("--target", "tensorrt", "--layers"), "--layers compares ONNX graphs on a CPU"),
        (("--checkpoint", "a", "--against", "b"), "not allowed with argument --checkpoint"),
        (("--against-target", "ort-cpu"), "--against-target names a target of --against, which is missing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(bundle, capsys, arguments, message):
    assert compare(bundle.path, *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_checkpoint_that_is_gone_is_named(tiny_llama, exported, tmp_path, capsys):
    data = json.loads((exported(tiny_llama()).path / "bundle.json").read_text())
    moved = tmp_path / "bundle"
    shutil.copytree(exported(tiny_llama()).path, moved)
    data["source"]["name"] = str(tmp_path / "gone")
    (moved / "bundle.json").write_text(json.dumps(data))
    assert compare(moved) == 2
    assert (
        "the checkpoint that was exported is not there any more; name it with --checkpoint"
        in capsys.readouterr().err
    )


def test_a_checkpoint_that_has_changed_is_refused(tiny_llama, exported, tmp_path, capsys):
    data = json.loads((exported(tiny_llama()).path / "bundle.json").read_text())
    moved = tmp_path / "bundle"
    shutil.copytree(exported(tiny_llama()).path, moved)
    data["source"]["name"] = str(tiny_llama(rms_norm_eps=0.1))
    (moved / "bundle.json").write_text(json.dumps(data))
    assert compare(moved) == 2
    assert "changed since it was exported" in capsys.readouterr().err
