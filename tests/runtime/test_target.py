"""A target is refused, with the reason, where it does not fit its bundle, the runtime or the GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgraph.export.bundle import Bundle, FileEntry, hash_file
from kvgraph.export.contract import Contract, scatter_state
from kvgraph.runtime.target import TARGET_FILE, Limits, Target, TargetGraph, available_targets

CONTRACT = Contract(97, 1, 64, False, scatter_state([(2, 8)], "float16", 32))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """The description of a bundle; targets ask it for no more."""
    files = {name: FileEntry(1, name) for name in ("prefill.onnx", "decode.onnx", "weights.safetensors")}
    return Bundle(
        path=tmp_path, schema_version=1, tool_version="0", model_type="llama", config={}, dtype="float16",
        residual_dtype="float16", contract=CONTRACT, recipe=None, source={}, weights={}, files=files, versions={},
    )  # fmt: skip


@pytest.fixture
def target(bundle: Bundle) -> Target:
    """A finished target of the bundle."""
    path = bundle.target_path("tensorrt-rtx")
    path.mkdir(parents=True)
    (path / "model.engine").write_bytes(b"engine")
    shapes = {"input_ids": ((1, 1), (2, 8), (2, 8))}
    target = Target(
        path=path, schema_version=1, tool_version="0", name="tensorrt-rtx", runtime_version="1.7.1.116",
        compute_capabilities=(89, 120), bundle_digest=bundle.digest(), contract=CONTRACT,
        graphs={graph: TargetGraph("model.engine", "prefill", 0, shapes) for graph in ("prefill", "decode")},
        limits=Limits(2, 32, 8), options={}, files={"model.engine": FileEntry(6, hash_file(path / "model.engine"))},
        build_time_s=1.0, peak_memory_bytes=1,
    )  # fmt: skip
    (path / TARGET_FILE).write_text(json.dumps(target.to_json()))
    return target


@pytest.fixture
def edit(target: Target) -> Callable[..., None]:
    """Changes entries of target.json."""

    def change(**entries: Any) -> None:
        file = target.path / TARGET_FILE
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

    return change


def test_what_was_written_is_read(bundle: Bundle, target: Target) -> None:
    found = Target.open(bundle, "tensorrt-rtx", verify=True)
    assert json.dumps(found.to_json()) == json.dumps(target.to_json())
    assert found.graph_path("decode") == target.path / "model.engine"
    assert available_targets(bundle) == ["tensorrt-rtx"]


def test_a_target_that_was_not_built_names_those_that_were(bundle: Bundle, target: Target) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no target 'ort-cpu' \(built: tensorrt-rtx\); build it with kvgraph"
    ):
        Target.open(bundle, "ort-cpu")


def test_an_engine_of_other_weights_is_refused(bundle: Bundle, edit: Callable[..., None]) -> None:
    edit(bundle_digest="0" * 64)
    with pytest.raises(ValueError, match="built from a bundle with digest 000000000000, this bundle has"):
        Target.open(bundle, "tensorrt-rtx")


def test_an_engine_of_another_version_is_refused(bundle: Bundle, edit: Callable[..., None]) -> None:
    edit(runtime_version="1.6.0.99")
    target = Target.open(bundle, "tensorrt-rtx")
    with pytest.raises(
        ValueError, match=r"built with tensorrt-rtx 1\.6\.0\.99, 1\.7\.1\.116 is installed.*build again"
    ):
        target.check_runtime("1.7.1.116", 89, bundle.build_command("tensorrt-rtx"))


def test_an_engine_for_another_gpu_is_refused(bundle: Bundle, edit: Callable[..., None]) -> None:
    edit(compute_capabilities=[80, 86])
    target = Target.open(bundle, "tensorrt-rtx")
    with pytest.raises(
        ValueError, match=r"built for SM80, SM86, this GPU is SM89; .* --compute-capability 89"
    ):
        target.check_runtime("1.7.1.116", 89, bundle.build_command("tensorrt-rtx"))


def test_an_engine_that_fits_is_taken(bundle: Bundle, target: Target) -> None:
    target.check_runtime("1.7.1.116", 120, bundle.build_command("tensorrt-rtx"))


def test_a_newer_form_is_refused(bundle: Bundle, edit: Callable[..., None]) -> None:
    edit(schema_version=2, tool_version="9.9")
    with pytest.raises(
        ValueError, match=r"schema version 2, this kvgraph reads up to 1; install kvgraph 9\.9 or newer"
    ):
        Target.open(bundle, "tensorrt-rtx")


@pytest.mark.parametrize("entry", ["contract", "graphs", "limits", "files"])
def test_a_description_that_is_none_is_refused(bundle: Bundle, edit: Callable[..., None], entry: str) -> None:
    edit(**{entry: {"x": 1}})
    with pytest.raises(ValueError, match="not a target description"):
        Target.open(bundle, "tensorrt-rtx")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_file_that_is_no_json_object_is_refused(bundle: Bundle, target: Target, text: str) -> None:
    (target.path / TARGET_FILE).write_text(text)
    with pytest.raises(ValueError, match=r"target\.json"):
        Target.open(bundle, "tensorrt-rtx")


def test_a_missing_engine_is_named(bundle: Bundle, target: Target) -> None:
    (target.path / "model.engine").unlink()
    with pytest.raises(ValueError, match=r"model\.engine: missing, though target\.json lists it"):
        Target.open(bundle, "tensorrt-rtx")


def test_a_shortened_engine_is_named(bundle: Bundle, target: Target) -> None:
    (target.path / "model.engine").write_bytes(b"engin")
    with pytest.raises(ValueError, match=r"model\.engine: 5 bytes, target\.json says 6"):
        Target.open(bundle, "tensorrt-rtx")


def test_a_changed_engine_is_found_on_request(bundle: Bundle, target: Target) -> None:
    (target.path / "model.engine").write_bytes(b"enginE")
    Target.open(bundle, "tensorrt-rtx")
    with pytest.raises(ValueError, match=r"model\.engine: sha256"):
        Target.open(bundle, "tensorrt-rtx", verify=True)


def test_a_file_outside_of_the_target_is_refused(bundle: Bundle, edit: Callable[..., None]) -> None:
    edit(files={"../../prefill.onnx": {"size": 1, "sha256": ""}})
    with pytest.raises(ValueError, match=r"file '\.\./\.\./prefill\.onnx' leaves the target"):
        Target.open(bundle, "tensorrt-rtx")
