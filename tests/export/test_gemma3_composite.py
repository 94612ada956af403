"""Gemma 3 with a vision part: its language model is exported, and what it leaves out is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.torch_session import TorchSession
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.config import ModelConfig
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

# float32 sums in another order.
TOLERANCE = 1e-4
LENGTH, VOCABULARY = 24, 97


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 20,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "sliding_window": 5,
        "query_pre_attn_scalar": 8,
        "initializer_range": 0.3,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90)
    path = tmp_path_factory.mktemp("gemma3")
    Gemma3ForConditionalGeneration(config).save_pretrained(path)
    return path


def expected(checkpoint: Path, ids: Ids) -> Floats:
    model = Gemma3ForConditionalGeneration.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: Floats = model(torch.from_numpy(ids)).logits.numpy()
    return logits


def test_text_equals_transformers(
    checkpoint: Path, random_ids: Callable[..., Ids], teacher_forced: Callable[..., Floats]
) -> None:
    ids = random_ids(2, LENGTH)
    found = teacher_forced(TorchSession.open(open_checkpoint(checkpoint)), ids, [9, *[1] * (LENGTH - 9)])
    np.testing.assert_allclose(found, expected(checkpoint, ids), atol=TOLERANCE)


def test_export_says_what_is_left_out(
    checkpoint: Path,
    tmp_path: Path,
    quick_tracing: None,
    random_ids: Callable[..., Ids],
    teacher_forced: Callable[..., Floats],
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "bundle"
    assert main(["export", str(checkpoint), "-o", str(output), "--dtype", "float32"]) == 0
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        seen = [name for name in file.keys() if not name.startswith("language_model.")]  # noqa: SIM118
    line = f"left out: {len(seen)} tensors of vision_tower, multi_modal_projector; the graphs read text alone"
    assert line in capsys.readouterr().out.splitlines()
    with safe_open(output / WEIGHTS_FILE, "np") as file:
        assert not [name for name in file.keys() if "vision" in name or "projector" in name]  # noqa: SIM118
    ids = random_ids(2, LENGTH)
    found = teacher_forced(OrtSession(Bundle.open(output), threads=1), ids, [LENGTH])
    np.testing.assert_allclose(found, expected(checkpoint, ids), atol=TOLERANCE)


def test_a_tensor_of_no_known_part_is_still_refused(checkpoint: Path, tmp_path: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    save_file({**weights, "audio_tower.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(ValueError, match=r"'audio_tower.weight' not expected|audio_tower"):
        TorchSession.open(open_checkpoint(tmp_path))


def test_published_configs_leave_out_what_their_class_says() -> None:
    """As google/gemma-3-4b-it is published."""
    hf = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    config = ModelConfig.from_hf(json.loads(json.dumps(hf)))
    theirs = Gemma3Config(**hf).text_config
    for key in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        assert getattr(config, key) == getattr(theirs, key)
    assert config.layer_types == tuple(theirs.layer_types)
    assert (config.query_pre_attn_scalar, config.sliding_window) == (theirs.query_pre_attn_scalar, 1024)
    assert (config.eos_token_ids, config.dtype, config.max_positions) == ((1, 106), "bfloat16", 131072)
    for rope, kind in ((config.rope, "full_attention"), (config.sliding_rope, "sliding_attention")):
        assert rope.rope_theta == theirs.rope_parameters[kind]["rope_theta"]
