"""bundle.json whose parts contradict each other is refused when it is opened."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgraph.export.bundle import BUNDLE_FILE, Bundle


@pytest.fixture(scope="session")
def original(tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]) -> Bundle:
    return exported(tiny_llama())


def first_key(data: dict[str, Any]) -> dict[str, Any]:
    tensor: dict[str, Any] = data["contract"]["state"][0]
    return tensor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda data: data["contract"].update(max_positions=512),
            "contract.max_positions is 512, config.max_position_embeddings 64",
        ),
        (
            lambda data: data["contract"].update(max_positions="64"),
            "contract.max_positions is '64', config.max_position_embeddings 64",
        ),
        (
            lambda data: data["config"].update(max_position_embeddings=32),
            "contract.max_positions is 64, config.max_position_embeddings 32",
        ),
        (
            lambda data: data["config"].update(num_hidden_layers=3),
            "contract.num_layers is 2, config.num_hidden_layers 3",
        ),
        (
            lambda data: data["config"].update(vocab_size=96),
            "contract.vocab_size is 97, config.vocab_size 96",
        ),
        (
            lambda data: data.update(dtype="float16"),
            "dtype of past_key_values.0.key is 'float32', dtype 'float16'",
        ),
        (lambda data: data.update(dtype="float8"), "dtype is 'float8', expected one of float32, float16"),
        (lambda data: data.update(residual_dtype=None), "residual_dtype is None, expected one of float32"),
        (
            lambda data: first_key(data).update(dtype="bfloat16"),
            "dtype of past_key_values.0.key is 'bfloat16', dtype 'float32'",
        ),
        (
            lambda data: data["contract"]["state"].pop(),
            "contract.state holds 3 tensors of 2 layers, expected a key and a value of each",
        ),
        (
            lambda data: first_key(data)["shape"].__setitem__(2, 65),
            "capacity of past_key_values.0.key is 65, contract.max_positions 64",
        ),
    ],
)
def test_contradictions_are_named(
    original: Bundle, tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    copy = Path(shutil.copytree(original.path, tmp_path / "copy"))
    data = json.loads((copy / BUNDLE_FILE).read_text(encoding="utf-8"))
    change(data)
    (copy / BUNDLE_FILE).write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"bundle\.json: {re.escape(message)}.*export"):
        Bundle.open(copy)


def test_a_rope_that_stretches_has_more_positions_than_the_config(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    bundle = exported(tiny_llama(max_position_embeddings=16, rope_parameters=rope), dtype="float32")
    assert Bundle.open(bundle.path).contract.max_positions == 32
