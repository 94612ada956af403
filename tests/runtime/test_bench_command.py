"""`kvgraph bench` on a real bundle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraph import cli
from kvgraph.export.bundle import Bundle


def test_command_measures_a_bundle_and_writes_the_report(
    shared_data: Path,
    exported: Callable[..., Bundle],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraph.runtime.bench.read_bandwidth", lambda threads: 1e9)
    # Between what steps at 8 and at 100 tokens read.
    monkeypatch.setattr("kvgraph.runtime.bench.last_level_cache_bytes", lambda: 260_032 * 4 + 100_000)
    path, file = exported(shared_data / "stories260k").path, tmp_path / "bench.json"
    sizes = ["--prompt-tokens", "8", "--new-tokens", "4", "--context", "8,100", "--batch", "2", "--runs", "1"]
    assert cli.main(["bench", str(path), *sizes, "--threads", "1", "--json", str(file)]) == 0

    data = json.loads(file.read_text())
    assert (data["bundle"], data["target"]) == (str(path), None)
    assert [speed["context"] for speed in data["decode"]] == [8, 100]
    assert data["decode"][1]["capacity"] == 128  # the buffers double
    # 260,032 parameters (tied, all read) and 2 rows of 100 tokens of 1,280 bytes.
    assert data["decode"][1]["bytes_read"] == 260_032 * 4 + 2 * 100 * 1280
    assert data["decode"][0]["bandwidth_share"] is None
    assert data["decode"][1]["bandwidth_share"] == data["decode"][1]["bytes_per_s"] / 1e9
    assert 0 < data["loop_overhead"]["median_s"] < data["time_to_first_token"]["median_s"]
    assert data["session"]["device"] == "cpu"

    shown = capsys.readouterr().out
    for text in ("onnxruntime", "prefill", "tokens/s", "100 tokens", "peak memory", data["machine"]["cpu"]):
        assert text in shown
    short, long = (line for line in shown.splitlines() if line.startswith(("8 tokens", "100 tokens")))
    assert short.endswith("in cache")
    assert long.endswith("%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "8,x"], "'8,x', expected a number"),
        (["--threads", "1", "--target", "tensorrt"], "threads are for a CPU, but the device is cuda"),
        (["--target", "ort-cpu"], "no target 'ort-cpu'"),
    ],
)
def test_argument_out_of_place_is_one_line(
    shared_data: Path,
    exported: Callable[..., Bundle],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", str(exported(shared_data / "stories260k").path), *arguments]) == 2
    assert message in capsys.readouterr().err
