"""The script that measures forms of a mixture of experts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


def test_each_step_is_measured_in_two_forms(capsys: pytest.CaptureFixture[str], quick_tracing: None) -> None:
    script = runpy.run_path(str(Path(__file__).with_name("experts.py")))
    script["measure"]((7, 2, 6, 5), threads=1, rounds=1)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "7 experts, 2 for a token, hidden size 6, width 5, float32"
    assert len(lines) == len(script["DECODED"]) + len(script["PROMPTS"])
    assert all("everywhere" in line and line.endswith("times as fast") for line in lines)
