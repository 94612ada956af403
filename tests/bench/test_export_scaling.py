"""The script that measures what an export costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

# What an export may add to an interpreter that has imported torch.
MEMORY_LIMIT = 1.5e9


@pytest.fixture(scope="module")
def script(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(Path(__file__).with_name("export_scaling.py"))


@pytest.mark.slow
def test_graphs_of_70_billion_parameters_are_made_in_little_memory(
    script: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**script.LLAMA_3_70B, "num_hidden_layers": 80}))
    result = script.export(tmp_path / "config.json", tmp_path / "bundle", "graphs")
    assert result["memory_bytes"] < MEMORY_LIMIT
    assert (tmp_path / "bundle" / "prefill.onnx").stat().st_size < 5e6


@pytest.mark.slow
def test_weights_are_measured_beside_a_plain_copy(
    script: ModuleType, tiny_llama: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.measure_weights(tiny_llama(), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].partition(",")[0] for line in lines] == [
        tiny_llama().name,
        "of that the weights",
        "a plain copy",
    ]
