"""Writing the checkpoint of a case, with weights large enough for every part to matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
)

from family_cases.case import Case
from family_cases.textbook import shapes


def write_checkpoint(case: Case, path: Path) -> None:
    """The directory of a case."""
    if case.is_textbook:
        write_textbook(case, path)
        return
    torch.manual_seed(7)
    config = AutoConfig.for_model(case.family, **case.config)
    model = model_class(config.to_dict()).from_config(config)
    for parameter in model.parameters():
        # Norm weights and biases, which transformers leaves at one and zero.
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    model.save_pretrained(path)
    if case.own_head:
        give_own_head(path)


def model_class(config: Mapping[str, Any]) -> Any:
    """What makes the model of a config.json in transformers."""
    if config.get("is_encoder_decoder"):
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


def write_textbook(case: Case, path: Path) -> None:
    """Random tensors under the documented names."""
    random = np.random.default_rng(11)
    tensors = {
        name: (random.normal(0, 0.4, shape) + ("norm" in name)).astype(np.float32)
        for name, shape in shapes(case.config).items()
    }
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(case.config))


def give_own_head(path: Path) -> None:
    """What a T5 v1.1 checkpoint says, and transformers 5 does not write: a head beside the table."""
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = 0.3 * torch.randn_like(weights["shared.weight"])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    text = (path / "config.json").read_text()
    text = text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (path / "config.json").write_text(text.replace('"scale_decoder_outputs": true,', ""))
