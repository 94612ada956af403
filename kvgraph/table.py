"""Plain text tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Rows of cells under one another, columns two spaces apart.

    Args:
        rows: Cells; a row may be shorter than the widest.
        align: One letter a column, "l" left or "r" right.
    """
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, align, strict=False)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
