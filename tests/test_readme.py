"""The README's commands and examples work as they are printed.

Each ```console block's `$ kvgraph ...` lines run in order in one empty folder, in which `tests` is the repository's,
then each ```python block, in the same folder. A block that cannot run here (it needs a network, a GPU, a large
checkpoint) is fenced as ```text or ```sh.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

QUICK_START = ("export", "run")


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def blocks(readme: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)


def commands(readme: str) -> list[list[str]]:
    """The words of every kvgraph command line, with lines that end in a backslash joined."""
    text = "".join(blocks(readme, "console")).replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^\$ kvgraph (.*)$", text, re.MULTILINE)]


def test_quick_start_shows_export_and_run(readme: str) -> None:
    assert [name for name in QUICK_START if name not in {words[0] for words in commands(readme)}] == []


def test_commands_and_examples_run(readme: str, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(repository / "tests", target_is_directory=True)

    for arguments in [
        *(["-m", "kvgraph", *words] for words in commands(readme)),
        *(["-c", example] for example in blocks(readme, "python")),
    ]:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stderr}"
