"""Typed, strict reading of a Hugging Face config.json.

A `ConfigReader` remembers which keys were read. When a family has taken what it implements, `refuse_unread` turns
every other key into an error, unless it is known not to change what the model computes: a key that nobody reads is
a feature that would silently be missing from the graph.

A null value means the same as an absent key, as in Hugging Face.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from kvgraph.models.config_keys import HARMLESS_KEYS, OFF_VALUES, REFUSALS


class ConfigReader:
    """Values of a config.json by key, with the keys read so far."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        """Read from `values`, naming `where` in every error."""
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def error(self, message: str) -> ValueError:
        """The error to raise about a value of this file."""
        return ValueError(f"{self._where}: {message}")

    def has(self, *spellings: str) -> bool:
        """Whether any of these keys is present and not null."""
        return any(self._values.get(key) is not None for key in spellings)

    def value(self, *spellings: str) -> Any:
        """The value under whichever of these keys is present, or None.

        Raises:
            ValueError: Two of the keys are present and differ.
        """
        self._read.update(spellings)
        present = {key: self._values[key] for key in spellings if self._values.get(key) is not None}
        if not present:
            return None
        (first, value), *others = present.items()
        for key, other in others:
            if other != value:
                raise self.error(
                    f"{first} is {value!r} but {key} is {other!r}; they mean the same, remove one"
                )
        return value

    def integer(self, *spellings: str, minimum: int = 1, default: int | None = None) -> int:
        """An integer of at least `minimum`; an error if it is absent and has no default."""
        value = self._required(spellings, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(
                f"{self._spelled(spellings)} is {value!r}, expected an integer of at least {minimum}"
            )
        return value

    def number(self, *spellings: str, default: float | None = None) -> float:
        """A finite number above zero; an error if it is absent and has no default."""
        value = self._required(spellings, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value <= sys.float_info.max
        ):
            raise self.error(f"{self._spelled(spellings)} is {value!r}, expected a finite number above 0")
        return float(value)

    def flag(self, *spellings: str, default: bool | None = None) -> bool:
        """True or false; an error if it is absent and has no default."""
        value = self._required(spellings, default)
        if not isinstance(value, bool):
            raise self.error(f"{self._spelled(spellings)} is {value!r}, expected true or false")
        return value

    def text(self, *spellings: str, default: str | None = None) -> str:
        """A string; an error if it is absent and has no default."""
        value = self._required(spellings, default)
        if not isinstance(value, str):
            raise self.error(f"{self._spelled(spellings)} is {value!r}, expected a string")
        return value

    def token_ids(self, key: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Token ids given as one integer or a list; () for null, `default` where the key is absent."""
        self._read.add(key)
        if key not in self._values:
            return default
        value = self._values[key]
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise self.error(f"{key} is {value!r}, expected a token id or a list of token ids")
        return tuple(dict.fromkeys(ids))

    def section(self, *spellings: str) -> ConfigReader | None:
        """A reader of the object under whichever of these keys is present, or None."""
        value = self.value(*spellings)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(f"{self._spelled(spellings)} is {value!r}, expected an object")
        return ConfigReader(value, f"{self._where}: {self._spelled(spellings)}")

    def unread(self) -> dict[str, Any]:
        """What is present, not null and not read so far."""
        return {
            key: value for key, value in self._values.items() if key not in self._read and value is not None
        }

    def refuse_unread(self, model_type: str) -> None:
        """Refuse whatever has not been read and may change the logits.

        Raises:
            ValueError: Names every such key and its value.
        """
        unknown = []
        for key, value in self.unread().items():
            if key in REFUSALS:
                raise self.error(f"{key} is set: {REFUSALS[key]}")
            if key in HARMLESS_KEYS or (key in OFF_VALUES and value == OFF_VALUES[key]):
                continue
            unknown.append(f"{key}={value!r}")
        if unknown:
            raise self.error(
                f"{', '.join(sorted(unknown))} may change what the model computes and is not implemented for "
                f"model_type {model_type!r}; remove what has no effect"
            )

    def _spelled(self, spellings: tuple[str, ...]) -> str:
        """The one of several spellings that the file uses."""
        return next(key for key in spellings if self.has(key))

    def _required(self, spellings: tuple[str, ...], default: Any) -> Any:
        value = self.value(*spellings)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{' or '.join(spellings)} is missing")
        return value
