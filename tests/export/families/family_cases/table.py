"""The README's table of families: made from what a run of the tests found, and read back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
HEADER = (
    "| family | what the tested checkpoints have | float32: logits | cache | float16 | TensorRT-RTX |",
    "|---|---|---|---|---|---|",
)
# What a test records under `family`, and which of several numbers the table shows: the largest.
ERRORS = ("float32", "cache", "float16")


def rows_of(facts: Iterable[Mapping[str, Any]], families: Iterable[str]) -> list[str]:
    """A row for every family.

    Raises:
        ValueError: Nothing, or not everything, was recorded of a family.
    """
    gathered: dict[str, dict[str, Any]] = {}
    for fact in facts:
        known = gathered.setdefault(fact["family"], {"features": [], "tensorrt": []})
        for name in ERRORS:
            if name in fact:
                known[name] = max(fact[name], known.get(name, 0.0))
        for name in ("features", "tensorrt"):
            known[name] += [entry for entry in fact.get(name, ()) if entry not in known[name]]
    rows = []
    for family in sorted(families):
        found = gathered.get(family, {})
        missing = [name for name in (*ERRORS, "features", "tensorrt") if not found.get(name)]
        if missing:
            raise ValueError(f"no test of {family} recorded {', '.join(missing)}")
        numbers = " | ".join(f"{found[name]:.0e}" for name in ERRORS)
        rows.append(
            f"| {family} | {', '.join(found['features'])} | {numbers} | {'; '.join(found['tensorrt'])} |"
        )
    return rows


def write_table(readme: Path, rows: Iterable[str]) -> None:
    """Put the rows between the README's two markers.

    Raises:
        ValueError: The markers are not there.
    """
    text = readme.read_text(encoding="utf-8")
    table = "\n".join((BEGIN, *HEADER, *rows, END))
    changed, times = re.subn(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: table, text, flags=re.DOTALL)
    if times != 1:
        raise ValueError(f"{readme}: expected the lines {BEGIN} and {END} once, found {times} such pairs")
    readme.write_text(changed, encoding="utf-8")


def families_in(readme: Path) -> list[str]:
    """The families that the README's table has a row for, in order."""
    text = readme.read_text(encoding="utf-8")
    table = text.partition(BEGIN)[2].partition(END)[0]
    return re.findall(r"^\| (\w+) \|", table, re.MULTILINE)[1:]
