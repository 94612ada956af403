"""`kvgraph build --standalone`: one target in a bundle of its own, from end to end, with the bundle itself gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.cli import main
from kvgraph.export.bundle import BUNDLE_FILE, Bundle
from kvgraph.export.targets.ort_cpu import KERNELS, build_ort_cpu
from kvgraph.export.targets.standalone import build_standalone
from kvgraph.runtime.bench import weights_read
from kvgraph.runtime.open import open_session

PROMPT = "Once upon a time"
WEIGHTS = "weights.safetensors"

Exported = Callable[..., Bundle]


@pytest.fixture(scope="module")
def whole(repository: Path, exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The small model of the repository, which has a tokenizer, without targets of other tests."""
    source = exported(repository / "tests" / "tiny_model" / "model").path
    copy = tmp_path_factory.mktemp("whole") / "bundle"
    return Bundle.open(shutil.copytree(source, copy, ignore=shutil.ignore_patterns("targets")))


@pytest.fixture(scope="module")
def built(whole: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its ort-cpu target alone; tests that change it copy it."""
    output = tmp_path_factory.mktemp("alone") / "dir"
    build_standalone(whole, output, lambda: build_ort_cpu(whole))
    return output


@pytest.fixture
def alone(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "moved to another place"))


def files_of(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()
    }


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    line = captured.err.splitlines()[-1]
    assert line.startswith("kvgraph: error: ")
    return line


@pytest.mark.parametrize("form", KERNELS)
def test_it_computes_what_the_target_does_when_the_bundle_is_gone(
    form: Any,
    whole: Bundle,
    tmp_path: Path,
    teacher_forced: Callable[..., Any],
) -> None:
    bundle = Bundle.open(shutil.copytree(whole.path, tmp_path / "bundle"))
    build_standalone(bundle, tmp_path / "alone", lambda: build_ort_cpu(bundle, form))
    ids = np.random.default_rng(3).integers(0, bundle.contract.vocab_size, (2, 9))
    logits = teacher_forced(open_session(bundle, "ort-cpu"), ids, [6, 1, 1, 1])
    text = kvgraph.load(bundle.path, "ort-cpu").generate(PROMPT, max_new_tokens=20).text
    sizes = files_of(bundle.path)
    shutil.rmtree(bundle.path)
    moved = (tmp_path / "alone").rename(tmp_path / "moved")
    found = teacher_forced(open_session(Bundle.open(moved)), ids, [6, 1, 1, 1])
    np.testing.assert_array_equal(found, logits)
    assert kvgraph.load(moved, verify=True).generate(PROMPT, max_new_tokens=20).text == text
    # No graph that is not the target's, and weights once.
    assert not list(moved.glob("*.onnx"))
    assert len(list(moved.rglob(WEIGHTS))) == 1
    assert sum(files_of(moved).values()) < sum(sizes.values())
    assert (moved / WEIGHTS).is_file() == (form == "onnxruntime")


def test_description_lists_every_file_and_is_read_as_written(built: Path, whole: Bundle) -> None:
    written = json.loads((built / BUNDLE_FILE).read_text())
    found = Bundle.open(built, verify=True)
    assert json.loads(json.dumps(found.to_json())) == written
    assert written["standalone"] == {"target": "ort-cpu", "digest": whole.digest()}
    assert set(written["files"]) == set(files_of(built)) - {BUNDLE_FILE}
    assert {"tokenizer.json", "targets/ort-cpu/target.json"} < set(written["files"])
    same = ("config", "contract", "recipe", "source", "versions", "weights", "dtype")
    whole_json = json.loads((whole.path / BUNDLE_FILE).read_text())
    assert {key: written[key] for key in same} == {key: whole_json[key] for key in same}
    assert "standalone" not in whole_json
    assert (whole.standalone, whole.choose_target(None)) == (None, None)


def test_every_command_takes_the_target_without_being_told(
    built: Path, whole: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("The dog ran to the tree. " * 4, encoding="utf-8")
    for arguments in (
        ["run", built, "--prompt", PROMPT, "--max-new-tokens", "4", "--verify"],
        ["run", built, "--prompt", PROMPT, "--max-new-tokens", "4", "--target", "ort-cpu"],
        ["perplexity", built, "--text", text],
        ["compare", whole.path, "--against", built, "--steps", "3"],
        ["compare", built, "--against", whole.path, "--steps", "3"],
        ["bench", built, "--prompt-tokens", "4", "--new-tokens", "2", "--json", tmp_path / "bench.json"],
    ):
        assert main([str(argument) for argument in arguments]) == 0, arguments
        captured = capsys.readouterr()
        assert f"{built}, target ort-cpu" in captured.out + captured.err or arguments[0] == "bench"
    assert json.loads((tmp_path / "bench.json").read_text())["target"] == "ort-cpu"


def test_inspect_shows_the_operators_of_the_target(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(built)]) == 0
    out = capsys.readouterr().out
    assert "the target ort-cpu alone" in out
    assert "targets/ort-cpu/prefill.onnx" in out
    assert main(["inspect", str(built), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["standalone"] == "ort-cpu"
    assert [target["current"] for target in found["targets"]] == [True]
    assert found["operators"]["prefill"]["counts"]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["run", "ALONE", "--prompt", "a", "--target", "tensorrt-rtx"], "not tensorrt-rtx"),
        (["perplexity", "ALONE", "--text", "TEXT", "--target", "tensorrt"], "not tensorrt;"),
        (["quantize", "ALONE", "--recipe", "int8-wo", "-o", "OUTPUT"], "that kvgraph quantize needs"),
        (["build", "ALONE", "--target", "ort-cpu"], "that kvgraph build needs"),
        (["build", "ALONE", "--target", "ort-cpu", "--standalone", "OUTPUT"], "that kvgraph build needs"),
        (["compare", "ALONE", "--layers"], "that --layers needs"),
        (["compare", "WHOLE", "--against", "ALONE", "--layers"], "that --layers needs"),
        (["compare", "ALONE", "--save-polygraphy", "OUTPUT"], "that --save-polygraphy needs"),
    ],
)
def test_what_needs_more_than_the_target_says_so(
    built: Path, whole: Bundle, tmp_path: Path, capsys: Any, arguments: list[str], needed: str
) -> None:
    (tmp_path / "text").write_text("a b c", encoding="utf-8")
    words = {"ALONE": built, "WHOLE": whole.path, "TEXT": tmp_path / "text", "OUTPUT": tmp_path / "output"}
    error = error_of(capsys, *(words.get(word, word) for word in arguments))
    assert f"{built}: holds the target ort-cpu alone" in error
    assert needed in error
    assert "give the bundle that it was built from" in error
    assert not (tmp_path / "output").exists()


def test_every_changed_file_is_found(alone: Path) -> None:
    for name in sorted(set(files_of(alone)) - {BUNDLE_FILE}):
        content = (alone / name).read_bytes()
        (alone / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=r"the file was changed, build it again with .* --standalone"):
            kvgraph.load(alone, verify=True)
        (alone / name).write_bytes(content[:-1])
        with pytest.raises(ValueError, match="the file is damaged, build it again"):
            Bundle.open(alone)
        (alone / name).unlink()
        with pytest.raises(ValueError, match=r"missing, though bundle\.json lists it"):
            Bundle.open(alone)
        (alone / name).write_bytes(content)
    kvgraph.load(alone, verify=True)


@pytest.mark.parametrize("value", ["ort-cpu", {}, {"target": "ort-cpu"}, None, {"x": 1}])
def test_a_description_that_is_none_is_refused(alone: Path, value: object) -> None:
    file = alone / BUNDLE_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "standalone": value}))
    with pytest.raises(ValueError, match="not a bundle description"):
        Bundle.open(alone)


@pytest.mark.parametrize(("place", "where"), [("", "is"), ("targets/x", "inside"), ("..", "around")])
def test_an_output_in_the_bundle_is_refused_before_building(
    whole: Bundle, capsys: Any, monkeypatch: pytest.MonkeyPatch, place: str, where: str
) -> None:
    monkeypatch.setattr("kvgraph.commands.build._build", lambda *_: pytest.fail("work was done"))
    output = whole.path / place
    flags = ("--standalone", output, "--force")
    error = error_of(capsys, "build", whole.path, "--target", "ort-cpu", *flags)
    assert f"{output}: {where if where == 'is' else f'lies {where}'} the bundle to build" in error


def test_what_is_there_is_replaced_only_if_asked_to(whole: Bundle, tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "output"
    build = ("build", whole.path, "--target", "ort-cpu")
    assert main([*map(str, build), "--standalone", str(output)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{output}: the target ort-cpu alone, ")
    assert "use --force to replace it" in error_of(capsys, *build, "--standalone", output)
    assert main([*map(str, build), "--standalone", str(output), "--force", "--kernels", "onnxruntime"]) == 0
    assert (output / WEIGHTS).is_file()
    assert "--force is for --standalone DIR" in error_of(capsys, *build, "--force")
    (output / "notes.txt").write_text("mine")
    assert "holds notes.txt" in error_of(capsys, *build, "--standalone", output, "--force")


def test_nothing_is_left_where_a_file_of_the_bundle_was_changed(whole: Bundle, tmp_path: Path) -> None:
    bundle = Bundle.open(shutil.copytree(whole.path, tmp_path / "bundle"))
    tokenizer = bundle.path / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes()[:-1] + b" ")
    with pytest.raises(ValueError, match=r"tokenizer\.json: sha256"):
        build_standalone(bundle, tmp_path / "alone", lambda: build_ort_cpu(bundle))
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_an_engine_needs_neither_graphs_nor_weights(
    whole: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "engine"
    flags = ["--compute-capability", "89", "--max-context", "64", "--standalone", str(output)]
    assert main(["build", str(whole.path), "--target", "tensorrt-rtx", *flags]) == 0
    found = Bundle.open(output, verify=True)
    folder = "targets/tensorrt-rtx"
    assert {name for name in found.files if "/" in name} == {
        f"{folder}/model.engine",
        f"{folder}/target.json",
    }
    assert not {WEIGHTS, "prefill.onnx", "decode.onnx"} & set(found.files)
    # What a step reads, of which the engine says nothing.
    assert weights_read(found, "tensorrt-rtx") == weights_read(whole)
    capsys.readouterr()
    assert main(["inspect", str(output)]) == 0
    assert "operators" not in capsys.readouterr().out
