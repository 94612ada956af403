"""The script that measures forms of a mixture of experts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from kvgraph.runtime.kernels import library_path


def test_each_step_is_measured_in_two_forms(capsys: pytest.CaptureFixture[str], quick_tracing: None) -> None:
    script = runpy.run_path(str(Path(__file__).with_name("experts.py")))
    script["measure"]((7, 2, 6, 5), threads=1, rounds=1)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "7 experts, 2 for a token, hidden size 6, width 5, float32"
    assert len(lines) == len(script["DECODED"]) + len(script["PROMPTS"])
    assert all("everywhere" in line and line.endswith("times as fast") for line in lines)


@pytest.mark.parametrize("bits", [32, 4])
def test_the_packed_form_is_measured(
    bits: int, capsys: pytest.CaptureFixture[str], quick_tracing: None
) -> None:
    if library_path() is None:
        pytest.skip("the operators were not compiled: there was no C++ compiler")
    script = runpy.run_path(str(Path(__file__).with_name("experts.py")))
    script["measure_packed"]((7, 2, 32, 64), bits, threads=1, rounds=1)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith(", float32" if bits == 32 else ", int4")
    assert len(lines) == len(script["DECODED"]) + len(script["PROMPTS"]) - 1
    assert all("kvgraph" in line and line.endswith("times as fast") for line in lines)
