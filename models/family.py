"""What an architecture file in `kvgraph.models.families` offers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraph.models.config import ModelConfig

if TYPE_CHECKING:
    from kvgraph.models.decoder import Decoder
    from kvgraph.models.layers import Precision

# model_type -> module, so that a family is imported when it is asked for.
FAMILIES = {"llama": "kvgraph.models.families.llama"}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture.

    Attributes:
        model_type: Its name in config.json.
        config_from_hf: Reads config.json; refuses what it does not honour.
        build: The module with unset parameters, on the current default device.
        weight_names: Checkpoint tensor name -> parameter name, "{i}" for the layer; None = known and dropped.
    """

    model_type: str
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    build: Callable[[ModelConfig, Precision], Decoder]
    weight_names: Mapping[str, str | None]


def family(model_type: str) -> Family:
    """The architecture that config.json names.

    Raises:
        ValueError: It is not known; the message lists the nearest known ones.
    """
    if model_type not in FAMILIES:
        near = difflib.get_close_matches(model_type, FAMILIES, n=3, cutoff=0.3) or sorted(FAMILIES)
        raise ValueError(
            f"model_type {model_type!r} is not known to kvgraph; the nearest are {', '.join(near)}"
        )
    found = importlib.import_module(FAMILIES[model_type]).FAMILY
    assert isinstance(found, Family)
    return found
