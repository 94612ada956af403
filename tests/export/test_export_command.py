"""`kvgraph export` as it is typed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle


@pytest.fixture
def checkpoint(tiny_llama: Callable[..., Path]) -> str:
    return str(tiny_llama())


@pytest.mark.parametrize("name", ["out", "Ünïcödé 模型 🙂"])
def test_export_prints_one_line_and_no_progress_where_nobody_watches(
    checkpoint: str, tmp_path: Path, quick: None, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["export", checkpoint, "-o", str(tmp_path / name)]) == 0
    out, err = capfd.readouterr()
    assert out == f"{tmp_path / name}: llama, 2 layers, float32, 4 files, 0.1 MB\n"
    assert err == ""
    Bundle.open(tmp_path / name, verify=True)


def test_existing_bundle_needs_force(
    checkpoint: str, tmp_path: Path, quick: None, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["export", checkpoint, "-o", str(tmp_path / "out")]
    assert main(command) == 0
    assert main(command) == 2
    assert capfd.readouterr().err == (
        f"kvgraph: error: {tmp_path / 'out'}: exists and is not empty; use --force to replace it\n"
    )
    assert main([*command, "--force"]) == 0


def test_flags_reach_the_export(checkpoint: str, tmp_path: Path) -> None:
    flags = ["--dtype", "float16", "--residual-dtype", "float32", "--no-weights", "--debug-outputs"]
    assert main(["export", checkpoint, "-o", str(tmp_path / "out"), *flags]) == 0
    bundle = Bundle.open(tmp_path / "out")
    assert (bundle.dtype, bundle.residual_dtype) == ("float16", "float32")
    assert "weights.safetensors" not in bundle.files
    assert b"hidden_states.2" in bundle.graph_path("decode").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./absent", "-o", "out"], "kvgraph: error: no such directory: ./absent\n"),
        (
            ["--capacity", "1"],
            "kvgraph: error: capacity is 1, expected 2 to 64, the positions of the model\n",
        ),
    ],
    ids=["no checkpoint", "no capacity"],
)
def test_bad_input_is_one_line_and_exit_code_2(
    checkpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = arguments if "-o" in arguments else [checkpoint, "-o", "out", *arguments]
    assert main(["export", *given]) == 2
    assert capfd.readouterr().err == message
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_killed_command_leaves_nothing_for_the_next_one_to_trip_over(checkpoint: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvgraph", "export", checkpoint, "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not list(tmp_path.glob(".out.tmp-*/weights.safetensors")):
        assert process.poll() is None
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "out").exists()
    subprocess.run(command, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    Bundle.open(tmp_path / "out", verify=True)
