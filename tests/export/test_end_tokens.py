from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraph.export.exporter import export_checkpoint
from kvgraph.models.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("config.json", 97),
        ("config.json", [2, 5000]),
        ("generation_config.json", 97),
        ("generation_config.json", [97]),
    ],
)
def test_end_token_outside_the_vocabulary_is_refused_with_key_and_value(
    tiny_llama: Callable[..., Path], tmp_path: Path, file: str, value: int | list[int]
) -> None:
    checkpoint = Path(shutil.copytree(tiny_llama(), tmp_path / "checkpoint"))
    content = json.loads((checkpoint / file).read_text(encoding="utf-8"))
    (checkpoint / file).write_text(json.dumps({**content, "eos_token_id": value}), encoding="utf-8")
    message = f"{file}: eos_token_id is {value!r}, expected 0 <= id < 97"
    with pytest.raises(ValueError, match=re.escape(message)):
        export_checkpoint(open_checkpoint(checkpoint), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
