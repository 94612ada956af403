"""The type of flags that take a list of numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def numbers(expected: str) -> Callable[[str], tuple[int, ...]]:
    """What argparse calls to read "1,2,3".

    Args:
        expected: What the error says that the flag takes.
    """

    def read(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(number) for number in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}") from None

    return read
