"""What tests of the models share: published configs."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def published_rms() -> Callable[..., dict[str, Any]]:
    """A config.json of a decoder in the manner of Llama with some keys changed; a value of ... leaves one out.

    Its keys are those of published files, the ones of transformers 4 among them; its sizes are smaller.
    """
    files = json.loads((Path(__file__).parent / "published_rms.json").read_text(encoding="utf-8"))

    def make(name: str, **changes: Any) -> dict[str, Any]:
        config = {**files["sizes"], **files[name], **changes}
        return copy.deepcopy({key: value for key, value in config.items() if value is not ...})

    return make
