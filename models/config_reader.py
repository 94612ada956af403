"""Typed, strict reading of a Hugging Face config.json.

A `ConfigReader` remembers which keys were read. When a family has taken what it implements, `refuse_unread` turns
every other key into an error, unless it is known not to change what the model computes: a key that nobody reads is
a feature that would silently be missing from the graph.

A null value means the same as an absent key, as in Hugging Face.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from kvgraph.models.config_keys import HARMLESS_KEYS, OFF_VALUES, REFUSALS


class ConfigReader:
    """Values of a config.json by key, with the keys read so far."""

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        aliases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Read from `values`, naming `where` in every error.

        Args:
            values: The object.
            where: What to call it.
            aliases: Key -> what the family calls the same thing; whoever asks for the key is given any of them.
        """
        self._values = values
        self._where = where
        self._aliases = aliases or {}
        self._read: set[str] = set()

    def error(self, message: str) -> ValueError:
        """The error to raise about a value of this file."""
        return ValueError(f"{self._where}: {message}")

    def has(self, *spellings: str) -> bool:
        """Whether any of these keys is present and not null."""
        return any(self._values.get(key) is not None for key in self._with_aliases(spellings))

    def value(self, *spellings: str) -> Any:
        """The value under whichever of these keys is present, or None.

        Raises:
            ValueError: Two of the keys are present and differ.
        """
        known = self._with_aliases(spellings)
        self._read.update(known)
        present = {key: self._values[key] for key in known if self._values.get(key) is not None}
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

    def optional_integer(self, *spellings: str, minimum: int = 1) -> int | None:
        """Like `integer`, but None where the key is null or absent."""
        return None if self.value(*spellings) is None else self.integer(*spellings, minimum=minimum)

    def optional_number(self, *spellings: str) -> float | None:
        """Like `number`, but None where the key is null or absent."""
        return None if self.value(*spellings) is None else self.number(*spellings)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above zero; an error if it is absent."""
        values = self._required((key,), None)
        if not isinstance(values, list):
            raise self.error(f"{key} is {values!r}, expected a list of numbers")
        return tuple(
            ConfigReader({key: value}, f"{self._where}: entry {index} of").number(key)
            for index, value in enumerate(values)
        )

    def sequence(self, key: str, length: int, known: Collection[Any]) -> tuple[Any, ...] | None:
        """A list of `length` values, each one of `known`; None where the key is null or absent."""
        values = self.value(key)
        if values is None:
            return None
        if not isinstance(values, list) or len(values) != length:
            raise self.error(f"{key} is {values!r}, expected a list of {length} values")
        unknown = [value for value in values if value not in known]
        if unknown:
            raise self.error(f"{key} holds {unknown[0]!r}; known: {', '.join(map(str, known))}")
        return tuple(values)

    def refuse_unstated(self, *keys: str) -> None:
        """Refuse a file that leaves out a key whose absence libraries read in different ways; null is an answer."""
        for key in keys:
            if key not in self._values:
                raise self.error(f"{key} is missing; say null for none")

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

    def ignore(self, *keys: str) -> None:
        """Take these keys as read: this family's computation does not depend on them."""
        self._read.update(keys)

    def accept_auto_map(self, architecture: str) -> None:
        """Accept modelling code in the checkpoint that goes by a name which transformers has since taken over.

        Args:
            architecture: The class, "FalconForCausalLM"; code under any other name stays refused.
        """
        auto_map = self._values.get("auto_map")
        if isinstance(auto_map, Mapping):
            named = str(auto_map.get("AutoModelForCausalLM"))
            if named.rpartition(".")[2] == architecture:
                self.ignore("auto_map")

    def require(self, key: str, expected: Any, reason: str) -> None:
        """Refuse a key whose value is there and another than `expected`, the only one that is implemented.

        Raises:
            ValueError: Names the key, both values and the reason.
        """
        value = self.value(key)
        if value is not None and value != expected:
            raise self.error(f"{key} is {value!r}, expected {expected!r}: {reason}")

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
        return next(key for key in self._with_aliases(spellings) if self._values.get(key) is not None)

    def _with_aliases(self, spellings: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for key in spellings for name in (key, *self._aliases.get(key, ())))

    def _required(self, spellings: tuple[str, ...], default: Any) -> Any:
        value = self.value(*spellings)
        if value is None:
            value = default
        if value is None:
            raise self.error(f"{' or '.join(self._with_aliases(spellings))} is missing")
        return value
