"""The script that writes random checkpoints to measure with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvgraph.export.inspect import inspect

SHAPE = {
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def script(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(Path(__file__).with_name("make_checkpoint.py"))


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_is_whole_by_the_rules_of_transformers(
    script: ModuleType, tied: bool, tmp_path: Path
) -> None:
    config = {**SHAPE, "tie_word_embeddings": tied}
    script.make_checkpoint(tmp_path / "model", config, shard_bytes=5000)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    model, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert inspect(tmp_path / "model").parameters == model.num_parameters()
    assert torch.isfinite(model(torch.arange(97)[None, :40]).logits).all()


def test_same_seed_gives_the_same_checkpoint(script: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        script.make_checkpoint(tmp_path / name, {**SHAPE, "tie_word_embeddings": True}, seed)
    digests = [inspect(tmp_path / name).source["digest"] for name in "abc"]
    assert digests[0] == digests[1] != digests[2]
