"""Fetching a checkpoint from the Hugging Face hub."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import cast

# What a checkpoint needs; other formats of the same weights stay where they are.
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "model.safetensors.index.json",
)
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors")
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")


def is_hub_id(text: str) -> bool:
    """Whether `text` can be a hub id: `name` or `owner/name`."""
    return _HUB_ID.fullmatch(text) is not None


def fetch_snapshot(hub_id: str, revision: str | None, *, weights: bool) -> tuple[Path, str]:
    """The local directory of a hub checkpoint, and the commit it is at.

    Args:
        hub_id: `owner/name`.
        revision: Branch, tag or commit; None for the default branch.
        weights: Whether to fetch the weights, too.

    Raises:
        ImportError: huggingface_hub is not installed.
        OSError: There is no such checkpoint or revision, no permission, or no network.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError as error:
        raise ImportError(
            f"fetching {hub_id!r} needs huggingface_hub; pip install 'kvgraph[export]', or give a directory"
        ) from error
    patterns = [*SMALL_FILES, *(WEIGHT_FILES if weights else ())]
    # What the HTTP library raises is not an OSError in every version; it is a base of the hub's own error.
    bases = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    failures: tuple[type[Exception], ...] = (OSError, ValueError, *bases)
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except failures as error:
        reason = textwrap.shorten(str(error), 200, placeholder="...")
        at = f" at revision {revision!r}" if revision else ""
        raise OSError(
            f"{hub_id!r} is not a directory, and fetching it{at} from the hub failed ({reason}); "
            "check the name and the network, or give the directory of a checkpoint"
        ) from error
    # The cache names a snapshot's folder after its commit.
    return folder, folder.name
