"""The flag that says how to quantize."""

from __future__ import annotations

import argparse

# Of the recipes that come with kvgraph; to read it from their files takes packages that --help does without.
CALIBRATED = ("fp8", "int8-sq")


def add_recipe_argument(parser: argparse.ArgumentParser, purpose: str, calibrates: bool) -> None:
    """Declare --recipe.

    Args:
        parser: Of the command.
        purpose: What the help begins with.
        calibrates: Whether the command takes recipes that need data.
    """
    from kvgraph.quant.recipe_files import recipe_names

    names = ", ".join(name for name in recipe_names() if name not in CALIBRATED)
    if calibrates:
        names += f"; with --calibration {', '.join(CALIBRATED)}"
    parser.add_argument(
        "--recipe",
        metavar="NAME|FILE|prefill=NAME,decode=NAME",
        help=f"{purpose}: a name, a TOML or JSON file, or one of them for each graph. Names: {names}",
    )
