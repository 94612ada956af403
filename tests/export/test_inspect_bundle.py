"""`kvgraph inspect` of a bundle: against its files, ONNX Runtime and its checkpoint."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from kvgraph import cli
from kvgraph.export.bundle import Bundle
from kvgraph.export.inspect import inspect


@pytest.fixture(scope="module")
def bundle(shared_data: Path, exported: Callable[..., Bundle]) -> Path:
    return exported(shared_data / "stories260k").path


def test_bundle_says_of_the_model_what_its_checkpoint_does(bundle: Path, shared_data: Path) -> None:
    found, source = inspect(bundle), inspect(shared_data / "stories260k")
    assert (found.parts, found.cache, found.contract, found.config) == (
        source.parts,
        source.cache,
        source.contract,
        source.config,
    )
    assert found.source["digest"] == source.source["digest"]


def test_weights_of_a_bundle_are_those_of_its_weights_file(bundle: Path) -> None:
    stored = load_file(bundle / "weights.safetensors")
    found = inspect(bundle)
    assert sum(kind.count for kind in found.weights) == len(stored)
    assert found.nbytes == sum(array.nbytes for array in stored.values())
    for kind in found.weights:
        array = stored[kind.name.replace("{i}", "0")]
        assert (kind.shape, kind.dtype) == (array.shape, array.dtype.name)


@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_contract_of_a_bundle_is_what_onnxruntime_sees(bundle: Path, graph: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(bundle / f"{graph}.onnx")
    expected = {("in", arg.name): len(arg.shape) for arg in session.get_inputs()}
    expected |= {("out", arg.name): len(arg.shape) for arg in session.get_outputs()}
    found = {
        (group.direction, group.name.replace("{i}", str(layer))): len(group.shape)
        for group in inspect(bundle).contract
        if group.graph == graph
        for layer in range(group.count)
    }
    assert found == expected


def test_operators_are_counted_for_each_graph(bundle: Path) -> None:
    operators = inspect(bundle).operators
    assert operators is not None
    for graph in ("prefill", "decode"):
        counts = operators[graph].counts
        # 5 layers: attention once each, keys and values scattered, seven projections, two norms and the last.
        assert {
            name: counts[name] for name in ("Attention", "TensorScatter", "MatMul", "RMSNormalization")
        } == {
            "Attention": 5,
            "TensorScatter": 10,
            "MatMul": 35,
            "RMSNormalization": 11,
        }
        assert operators[graph].opset == 24


def test_files_of_a_bundle_are_those_on_disk(bundle: Path) -> None:
    assert dict(inspect(bundle).files) == {file.name: file.stat().st_size for file in bundle.iterdir()}


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "copy")


@pytest.mark.parametrize("current", [True, False])
def test_target_is_listed_with_its_description_and_files(
    copy: Path, current: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy / "targets" / "ort-cpu"
    folder.mkdir(parents=True)
    digest = Bundle.open(copy).digest() if current else "0" * 64
    (folder / "target.json").write_text(json.dumps({"bundle_digest": digest, "runtime_version": "1.32.0"}))
    (folder / "decode.onnx").write_bytes(b"12345")
    (target,) = inspect(copy).targets
    assert (target.name, target.current) == ("ort-cpu", current)
    assert target.files["decode.onnx"] == 5

    assert cli.main(["inspect", str(copy)]) == 0
    shown = capsys.readouterr().out.partition("target ort-cpu")[2]
    assert "1.32.0" in shown
    assert ("build it again" in shown) == (not current)


def test_damaged_target_is_an_error(copy: Path) -> None:
    folder = copy / "targets" / "ort-cpu"
    folder.mkdir(parents=True)
    (folder / "target.json").write_text("[1")
    with pytest.raises(ValueError, match=r"target\.json: not valid JSON"):
        inspect(copy)


def test_bundle_needs_neither_torch_nor_onnx(bundle: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'safetensors', 'transformers'): sys.modules[name] = None\n"
        "from kvgraph.cli import main\n"
        f"sys.exit(main(['inspect', {str(bundle)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "onnx is not installed" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch is 0"),
        ({"context": 0}, "context is 0"),
        ({"context": 513}, "context is 513, expected 1 to 512"),
        ({"dtype": "float16"}, "dtype is for checkpoints"),
        ({"revision": "main"}, "revision is for checkpoints"),
    ],
)
def test_option_out_of_place_is_refused(bundle: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect(bundle, **options)  # type: ignore[arg-type]  # wrong values are the point


def test_damaged_graph_is_an_error(copy: Path) -> None:
    graph = copy / "decode.onnx"
    graph.write_bytes(b"\xff" * graph.stat().st_size)
    with pytest.raises(ValueError, match=r"decode\.onnx: not an ONNX file"):
        inspect(copy)


def test_json_is_one_object_with_the_same_figures(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle), "--json", "--batch", "2", "--context", "100"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameters"] == 260_032
    assert data["cache"]["nbytes"] == 2 * 100 * 5 * 2 * 4 * 8 * 4
    assert set(data["operators"]) == {"prefill", "decode"}
