"""The README's table of families, and what writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from family_cases.table import BEGIN, END, HEADER, families_in, rows_of, write_table

from kvgraph.models.family import FAMILIES

COMPLETE: dict[str, Any] = {
    "float32": 2e-6,
    "cache": 3e-7,
    "float16": 4e-3,
    "features": ["GQA", "rope"],
    "tensorrt": ["builds"],
}


def test_readme_has_a_row_for_every_family_and_no_other(
    repository: Path, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--families-table", default=None) is not None:
        pytest.skip("this run writes the table")
    assert families_in(repository / "README.md") == sorted(FAMILIES), "run make families"


def test_a_row_shows_the_largest_errors_and_every_feature_once() -> None:
    facts = [
        {"family": "llama", **COMPLETE},
        {"family": "gpt2", **COMPLETE},
        {"family": "llama", "float32": 5e-6, "features": ["MQA", "rope"]},
        {"family": "llama", "cache": 1e-8},
    ]
    assert rows_of(facts, ["llama", "gpt2"]) == [
        "| gpt2 | GQA, rope | 2e-06 | 3e-07 | 4e-03 | builds |",
        "| llama | GQA, rope, MQA | 5e-06 | 3e-07 | 4e-03 | builds |",
    ]


@pytest.mark.parametrize("name", COMPLETE)
def test_a_family_of_which_something_is_not_known_is_refused(name: str) -> None:
    facts = [{"family": "llama", **{key: COMPLETE[key] for key in COMPLETE if key != name}}]
    with pytest.raises(ValueError, match=f"no test of llama recorded {name}"):
        rows_of(facts, ["llama"])


def test_the_table_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    readme, row = tmp_path / "README.md", "| llama | GQA | 1e-06 | 1e-07 | 1e-03 | builds |"
    readme.write_text(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    write_table(readme, [row])
    assert readme.read_text() == "\n".join(["before", "", BEGIN, *HEADER, row, END, "", "after", ""])
    assert families_in(readme) == ["llama"]


def test_a_readme_without_markers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(BEGIN)
    with pytest.raises(ValueError, match="found 0 such pairs"):
        write_table(tmp_path / "README.md", [])
