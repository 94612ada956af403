"""What bundle.json says of a target that is alone: its canonical graphs and weights were left behind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Standalone:
    """What a bundle of one target alone has instead of canonical graphs.

    Attributes:
        target: The target's name.
        digest: `Bundle.digest` of the bundle that the target was built from.
    """

    target: str
    digest: str

    def choose(self, path: Path, asked: str | None) -> str:
        """The target, where it or none in particular is asked for.

        Raises:
            ValueError: Another one is asked for.
        """
        if asked not in (None, self.target):
            raise ValueError(
                f"{path}: holds the target {self.target} alone, not {asked}; leave the target out, or give the bundle "
                "that it was built from"
            )
        return self.target

    def refuse(self, path: Path, what: str) -> None:
        """Refuse what needs more than the target.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{path}: holds the target {self.target} alone, without the canonical graphs and weights that {what} "
            "needs; give the bundle that it was built from"
        )

    def build_command(self, path: Path, target: str) -> str:
        """How a target alone is built again; where from, `path` does not know."""
        return f"kvgraph build BUNDLE --target {target} --standalone {path} --force"
