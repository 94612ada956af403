"""Reading bundles: what is checked, what is refused, and that a bundle works wherever it is put."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kvgraph.export.bundle import BUNDLE_FILE, SCHEMA_VERSION, Bundle
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids


@pytest.fixture(scope="session")
def original(tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]) -> Bundle:
    return exported(tiny_llama())


@pytest.fixture
def copy(original: Bundle, tmp_path: Path) -> Path:
    """A bundle to spoil."""
    return Path(shutil.copytree(original.path, tmp_path / "copy"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change bundle.json."""
    data = json.loads((path / BUNDLE_FILE).read_text(encoding="utf-8"))
    change(data)
    (path / BUNDLE_FILE).write_text(json.dumps(data), encoding="utf-8")


def test_json_form_is_read_back_unchanged(original: Bundle) -> None:
    assert Bundle.open(original.path) == original
    assert json.loads((original.path / BUNDLE_FILE).read_text()) == json.loads(json.dumps(original.to_json()))


def test_every_file_is_listed(original: Bundle) -> None:
    on_disk = {path.name for path in original.path.iterdir()} - {BUNDLE_FILE}
    assert set(original.files) == on_disk
    assert on_disk == {"prefill.onnx", "decode.onnx", WEIGHTS_FILE, "generation_config.json"}


def test_hashes_are_those_of_sha256sum(original: Bundle) -> None:
    import hashlib

    for name, entry in original.files.items():
        content = (original.path / name).read_bytes()
        assert (entry.size, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_bundle_says_what_made_it_and_from_what(original: Bundle, tiny_llama: Callable[..., Path]) -> None:
    import kvgraph

    assert original.tool_version == kvgraph.__version__
    assert original.versions["onnx"] == onnx.__version__
    assert original.source["kind"] == "directory"
    assert original.source["name"] == str(tiny_llama())
    assert len(original.source["digest"]) == 64


def test_missing_directory_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such bundle; make one with kvgraph export"):
        Bundle.open(tmp_path / "absent")


def test_directory_without_description_is_not_a_bundle(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no bundle\.json, so it is not a finished bundle"):
        Bundle.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '"text"'])
def test_description_that_is_not_a_json_object_is_refused(copy: Path, text: str) -> None:
    (copy / BUNDLE_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"bundle\.json: (not valid JSON|holds a \w+, expected an object)"):
        Bundle.open(copy)


def test_newer_schema_names_the_version_it_needs(copy: Path) -> None:
    edit(copy, lambda data: data.update(schema_version=SCHEMA_VERSION + 1, tool_version="9.1.2", extra={}))
    with pytest.raises(ValueError, match=r"reads up to 1; install kvgraph 9\.1\.2 or newer"):
        Bundle.open(copy)


@pytest.mark.parametrize("version", [None, "1", 1.5, True, 0, -1])
def test_schema_version_that_is_not_one_is_refused(copy: Path, version: object) -> None:
    edit(copy, lambda data: data.update(schema_version=version))
    with pytest.raises(ValueError, match="schema version"):
        Bundle.open(copy)


@pytest.mark.parametrize("key", ["contract", "files", "weights", "dtype", "config", "source"])
def test_incomplete_description_names_what_is_missing(copy: Path, key: str) -> None:
    edit(copy, lambda data: data.pop(key))
    with pytest.raises(ValueError, match=f"not a bundle description .*{key}.*export it again"):
        Bundle.open(copy)


@pytest.mark.parametrize("recipe", [{}, {"prefill": {}, "decode": {}}, "int8-wo"])
def test_recipe_without_names_is_refused(copy: Path, recipe: object) -> None:
    edit(copy, lambda data: data.update(recipe=recipe))
    with pytest.raises(ValueError, match=r"not a bundle description .*export it again"):
        Bundle.open(copy)


def test_unknown_key_is_refused(copy: Path) -> None:
    edit(copy, lambda data: data.update(shards=2))
    with pytest.raises(ValueError, match=r"not a bundle description .*shards"):
        Bundle.open(copy)


def test_unknown_form_of_state_is_refused(copy: Path) -> None:
    edit(copy, lambda data: data["contract"]["state"][1].update(form="paged"))
    message = r"bundle\.json: state tensor 'past_key_values.0.value' has form 'paged'.*knows scatter, delta"
    with pytest.raises(ValueError, match=message):
        Bundle.open(copy)


def test_graph_that_is_not_listed_is_missed(copy: Path) -> None:
    edit(copy, lambda data: data["files"].pop("decode.onnx"))
    with pytest.raises(ValueError, match=r"does not list decode\.onnx"):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["prefill.onnx", WEIGHTS_FILE, "generation_config.json"])
def test_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(ValueError, match=f"{name}: missing, though bundle.json lists it"):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["decode.onnx", WEIGHTS_FILE])
@pytest.mark.parametrize("change", [-1, 1])
def test_file_of_another_size_is_always_noticed(copy: Path, name: str, change: int) -> None:
    os.truncate(copy / name, (copy / name).stat().st_size + change)
    with pytest.raises(ValueError, match=rf"{name}: \d+ bytes, bundle.json says \d+; the file is damaged"):
        Bundle.open(copy)


@pytest.mark.parametrize("name", ["decode.onnx", WEIGHTS_FILE])
def test_changed_byte_is_noticed_on_request(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[-1] ^= 1
    (copy / name).write_bytes(content)
    Bundle.open(copy)
    with pytest.raises(ValueError, match=f"{name}: sha256 .*the file was changed, export again"):
        Bundle.open(copy, verify=True)


def test_unchanged_bundle_passes_verification(copy: Path) -> None:
    assert Bundle.open(copy, verify=True).path == copy


@pytest.mark.parametrize("kind", ["parent", "absolute", "nested"])
def test_listed_file_outside_the_bundle_is_refused(copy: Path, tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("outside")
    name = {"parent": "../secret", "absolute": str(secret), "nested": "a/../../secret"}[kind]
    edit(copy, lambda data: data["files"].update({name: {"size": 7, "sha256": ""}}))
    with pytest.raises(ValueError, match="leaves the bundle"):
        Bundle.open(copy)


def test_link_out_of_the_bundle_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / WEIGHTS_FILE).rename(tmp_path / "weights")
    (copy / WEIGHTS_FILE).symlink_to(tmp_path / "weights")
    with pytest.raises(ValueError, match=r"leaves the bundle, to .*weights; refused"):
        Bundle.open(copy)


@pytest.mark.parametrize("location", ["../weights.safetensors", "{tmp_path}/weights.safetensors"])
def test_graph_whose_external_data_leaves_the_bundle_does_not_run(
    copy: Path, tmp_path: Path, location: str
) -> None:
    """The reader does not parse graphs; ONNX Runtime, and the checker that every build runs, refuse them."""
    shutil.copy(copy / WEIGHTS_FILE, tmp_path)
    for graph in ("prefill.onnx", "decode.onnx"):
        relocate(copy / graph, location.format(tmp_path=tmp_path))
        size = (copy / graph).stat().st_size
        edit(copy, lambda data, graph=graph, size=size: data["files"][graph].update(size=size))
        with pytest.raises(onnx.checker.ValidationError, match=r"outside the directory|absolute path"):
            onnx.checker.check_model(str(copy / graph))
    with pytest.raises(RuntimeError, match=r"prefill.onnx: .*(escapes model directory|Absolute path)"):
        OrtSession(Bundle.open(copy))


def relocate(graph: Path, location: str) -> None:
    """Point a graph's external data at another file."""
    model = onnx.load(str(graph), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    graph.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("name", ["moved", "with spaces in it", "Ünïcödé 模型 🙂"])
def test_bundle_runs_wherever_it_is_moved(
    original: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    random_ids: Callable[..., Ids],
    ort: Callable[..., OrtSession],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids = random_ids(1, 8)
    expected = teacher_forced(ort(original), ids, [6, 1, 1])
    copied = Path(shutil.copytree(original.path, tmp_path / "copied"))
    (tmp_path / "folder").mkdir()
    moved = copied.rename(tmp_path / "folder" / name)
    monkeypatch.chdir(tmp_path / "folder")
    for path in (moved, Path(name)):
        found = teacher_forced(OrtSession(Bundle.open(path, verify=True), threads=1), ids, [6, 1, 1])
        np.testing.assert_array_equal(found, expected)


def test_digest_changes_with_graphs_and_weights_and_with_nothing_else(original: Bundle, copy: Path) -> None:
    assert Bundle.open(copy).digest() == original.digest()
    edit(copy, lambda data: data["files"]["generation_config.json"].update(sha256="0" * 64))
    assert Bundle.open(copy).digest() == original.digest()
    for name in ("prefill.onnx", "decode.onnx", WEIGHTS_FILE):
        before = Bundle.open(copy).digest()
        edit(copy, lambda data, name=name: data["files"][name].update(sha256="0" * 64))
        assert Bundle.open(copy).digest() != before
