"""Checkpoints as they were published, by families with layer norms: old keys, old names, and what does not belong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.session import Floats, Ids

# float32 sums in another order, on logits of up to 12.
TOLERANCE = 1e-4
LENGTH = 24
FAMILIES = ("bloom", "falcon", "gpt2", "gpt_neox", "mpt", "phi", "starcoder2")
Teacher = Callable[..., Floats]


class Published:
    """A checkpoint with a published config.json, and what transformers makes of it."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        keys = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
        keys["initializer_range"] = 0.3
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **keys), attn_implementation="eager"
        )
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        model.save_pretrained(path)
        # In place of the keys that transformers 5 writes.
        (path / "config.json").write_text(json.dumps(config))
        self.path = path
        self.model = model.float().eval().requires_grad_(False)

    def rename(self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
        """Write the tensors again, changed."""
        file = self.path / "model.safetensors"
        save_file(change(load_file(file)), file)

    def logits(self, teacher_forced: Teacher, ids: Ids) -> Floats:
        session = TorchSession.open(open_checkpoint(self.path))
        return teacher_forced(session, ids, [ids.shape[1]], session.allocate_cache(1, ids.shape[1]))


@pytest.fixture
def published(model_type: str, repository: Path, tmp_path: Path) -> Published:
    files = json.loads((repository / "tests/models/published_layer_norm.json").read_text(encoding="utf-8"))
    return Published(files[model_type], tmp_path)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_published_keys_give_the_logits_of_transformers(
    published: Published, random_ids: Callable[..., Ids], teacher_forced: Teacher
) -> None:
    ids = random_ids(1, LENGTH)
    expected = published.model(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(published.logits(teacher_forced, ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom"])
def test_names_of_the_model_without_its_head_are_known(
    model_type: str, published: Published, random_ids: Callable[..., Ids], teacher_forced: Teacher
) -> None:
    ids = random_ids(1, LENGTH)
    expected = published.logits(teacher_forced, ids)
    published.rename(lambda tensors: {name.removeprefix("transformer."): x for name, x in tensors.items()})
    np.testing.assert_array_equal(published.logits(teacher_forced, ids), expected)


@pytest.mark.parametrize(
    ("model_type", "leftovers"),
    [
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"]),
        (
            "gpt_neox",
            [
                f"gpt_neox.layers.0.attention.{name}"
                for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
            ],
        ),
        ("falcon", ["transformer.h.1.self_attention.rotary_emb.inv_freq"]),
    ],
)
def test_masks_and_rotary_tables_of_old_files_are_left_alone(
    published: Published, leftovers: list[str], random_ids: Callable[..., Ids], teacher_forced: Teacher
) -> None:
    ids = random_ids(1, LENGTH)
    expected = published.logits(teacher_forced, ids)
    published.rename(lambda tensors: {**tensors, **{name: torch.ones(1, 1, 4, 4) for name in leftovers}})
    np.testing.assert_array_equal(published.logits(teacher_forced, ids), expected)


@pytest.mark.parametrize(
    ("model_type", "tensor"),
    [
        ("gpt2", "transformer.h.0.crossattention.c_attn.weight"),
        ("gpt_neox", "lm_head.weight"),
        ("phi", "model.layers.1.self_attn.q_layernorm.weight"),
        ("starcoder2", "model.layers.0.mlp.gate_proj.weight"),
        ("falcon", "transformer.h.0.self_attention.query_key_value.bias"),
        ("falcon", "transformer.h.0.ln_mlp.weight"),
        ("falcon", "transformer.h.0.post_attention_layernorm.weight"),
        ("bloom", "transformer.h.2.input_layernorm.weight"),
        ("mpt", "transformer.norm_f.bias"),
        ("mpt", "transformer.wpe.weight"),
    ],
)
def test_tensor_that_the_config_rules_out_is_refused(published: Published, tensor: str) -> None:
    published.rename(lambda tensors: {**tensors, tensor: torch.zeros(4)})
    with pytest.raises(ValueError, match=f"1 weight is not expected: {tensor}"):
        TorchSession.open(open_checkpoint(published.path))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_tensor_is_named(published: Published) -> None:
    missing = next(name for name in load_file(published.path / "model.safetensors") if ".0." in name)
    published.rename(lambda tensors: {name: x for name, x in tensors.items() if name != missing})
    with pytest.raises(ValueError, match=f"1 weight is missing: {missing}"):
        TorchSession.open(open_checkpoint(published.path))


@pytest.mark.parametrize("model_type", ["gpt2"])
def test_table_of_positions_is_the_limit(published: Published, random_ids: Callable[..., Ids]) -> None:
    session, longest = TorchSession.open(open_checkpoint(published.path)), 64
    assert session.contract.max_positions == longest
    cache, ids, past = session.allocate_cache(1), random_ids(1, longest), np.zeros(1, np.int64)
    session.prefill(cache, ids, past, past[:, None])
    with pytest.raises(ValueError, match=f"the cache allows {longest}"):
        session.decode(cache, ids[:, :1], past + longest)
