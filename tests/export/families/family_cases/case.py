"""A tiny checkpoint of a family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LENGTH, VOCABULARY = 64, 97
# A token that no text holds: M2M100 gives padding within a text no position.
PADDING = 7
# Large enough to matter.
EPSILON = 0.03
# The window of sliding layers, and the length up to which scaled ropes were trained: tests cross both.
WINDOW, TRAINED = 5, 16


@dataclass(frozen=True)
class Case:
    """What a checkpoint is made from.

    Attributes:
        name: The family, and after a comma what sets this checkpoint apart.
        config: Arguments of the configuration in transformers, or the config.json of a textbook model.
        exported: Whether it is exported, which takes seconds. Others vary what a traced case has already shown.
        own_head: Whether the checkpoint is given a head that transformers does not write.
    """

    name: str
    config: dict[str, Any]
    exported: bool = True
    own_head: bool = False

    @property
    def family(self) -> str:
        """The `model_type`."""
        return self.name.split(",")[0]

    @property
    def is_textbook(self) -> bool:
        """Whether transformers has no such model, and a formula stands in for it."""
        return "model_type" in self.config
