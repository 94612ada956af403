"""Strict reading of what a checkpoint says about its quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvgraph.models.config_reader import ConfigReader

WHERE = "config.json: quantization_config"


def refuse_unread(reader: ConfigReader, harmless: Iterable[str] = ()) -> None:
    """Refuse keys that nobody has read and that are not known to change nothing.

    Raises:
        ValueError: Names them and their values.
    """
    reader.ignore(*harmless)
    # A key that is off says nothing.
    unknown = {key: value for key, value in reader.unread().items() if value not in ({}, [], False)}
    if unknown:
        listed = ", ".join(f"{key}={value!r}" for key, value in sorted(unknown.items()))
        raise reader.error(f"{listed} may change what the model computes and is not implemented")


def section(reader: ConfigReader, values: Any, name: str, where: str) -> ConfigReader:
    """A reader of an object inside of another.

    Raises:
        ValueError: It is no object.
    """
    if not isinstance(values, Mapping):
        raise reader.error(f"{name} is {values!r}, expected an object")
    return ConfigReader(values, f"{where}: {name}")


def texts(reader: ConfigReader, key: str) -> tuple[str, ...]:
    """A list of strings; () where the key is null or absent.

    Raises:
        ValueError: It is something else.
    """
    values = reader.value(key)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise reader.error(f"{key} is {values!r}, expected a list of names")
    return tuple(values)


def matches(module: str, pattern: str) -> bool:
    """Whether a pattern means a module: its name, or "re:" and a regular expression for the start of it.

    Raises:
        ValueError: The expression is malformed.
    """
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return re.match(pattern.removeprefix("re:"), module) is not None
    except re.error as error:
        raise ValueError(f"{WHERE}: {pattern!r} is not a regular expression ({error})") from error
