"""Checks of the files that a command is to write, made before its work."""

from __future__ import annotations

from pathlib import Path


def check_folder(file: str | Path) -> None:
    """Raise FileNotFoundError where there is no folder to write `file` into."""
    if not Path(file).absolute().parent.is_dir():
        raise FileNotFoundError(f"{file}: its folder does not exist; make it, or name another file")
