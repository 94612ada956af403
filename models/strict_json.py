"""JSON files that must be one object with every key once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: The file is not UTF-8, not JSON, not an object, or names a key twice.
    """
    return parse_json_object(path.read_bytes(), str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The object in `data`; errors name `where`.

    Raises:
        ValueError: See `read_json_object`.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a valid JSON file: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} appears twice")
        result[key] = value
    return result
