"""The list of families."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgraph.models.family import FAMILIES, family


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_named_as_its_file(model_type: str) -> None:
    assert FAMILIES[model_type] == f"kvgraph.models.families.{model_type}"
    assert family(model_type).model_type == model_type


def test_every_file_of_a_family_is_listed(repository: Path) -> None:
    files = {path.stem for path in (repository / "models" / "families").glob("*.py")} - {"__init__"}
    assert files == set(FAMILIES)
