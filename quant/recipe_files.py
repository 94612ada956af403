"""The files of the recipes that come with kvgraph. Listing them needs no package, so that `--help` can."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable


def recipe_names() -> list[str]:
    """The recipes that come with kvgraph."""
    return sorted(
        file.name.removesuffix(".toml") for file in _folder().iterdir() if file.name.endswith(".toml")
    )


def recipe_text(name: str) -> str:
    """The TOML text of one of `recipe_names`."""
    return _folder().joinpath(f"{name}.toml").read_text(encoding="utf-8")


def _folder() -> Traversable:
    return resources.files("kvgraph.quant").joinpath("recipes")
