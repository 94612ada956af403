"""Logits over INT8 and FP8 caches, against transformers with rounded keys and values, and what they cost a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import past_key, past_value
from kvgraph.quant.plan import CacheRange, float_plan, with_cache
from kvgraph.quant.scheme import CacheScheme
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

FLOAT_PERPLEXITY = 6.762
# Sums in another order; where a value lies between two codes, it may fall to either.
MEAN_TOLERANCE, MOST_TOLERANCE = 2e-3, 0.3
WINDOWED = {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


def ranges_of(bundle: Bundle) -> dict[str, CacheRange]:
    """Offset and scale of every state tensor as the decode graph applies them."""
    model = ir.load(bundle.graph_path("decode"))
    constants = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value
    }
    assert bundle.recipe is not None
    unrotated = bundle.recipe["decode"]["kv_cache"]["keys"] == "unrotated"
    ranges = {}
    for tensor in bundle.contract.state:
        heads, channels = int(tensor.shape[1]), int(tensor.shape[3])
        per_channel = constants.get(f"{tensor.name}/scale.{heads}")
        scale = constants[f"{tensor.name}/scale"] if per_channel is None else per_channel[0, :, 0]
        offset = constants.get(f"{tensor.name}/offset", np.zeros((1, heads, 1, channels), np.float32))
        ranges[tensor.name] = CacheRange(scale, offset[0, :, 0], unrotated and tensor.role == "key")
    return ranges


def rounded(values: Tensor, span: CacheRange, form: str) -> Tensor:
    """Keys or values [B, K, T, D] as a quantized cache gives them back."""
    scale = torch.from_numpy(np.array(span.scale))
    heads = values.shape[1] if scale.ndim == 2 else -1
    scale = scale.reshape(1, heads, 1, -1) if scale.ndim == 2 else scale.reshape(1, heads, 1, 1)
    offset = torch.from_numpy(np.array(span.offset))[None, :, None]
    scaled = (values - offset) / scale
    if form == "int8":
        codes = scaled.round().clamp(-128, 127)
    else:
        codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return codes * scale + offset


def turned(keys: Tensor, direction: int) -> Tensor:
    """Keys [B, K, T, D] of positions 0 ... T - 1, turned by a rotary embedding of base 10000, or back."""
    half = keys.shape[-1] // 2
    angles = torch.arange(keys.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half) * direction
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def cached_keys(keys: Tensor, span: CacheRange, form: str) -> Tensor:
    """Keys [B, K, T, D] as attention reads them from a quantized cache."""
    if not span.unrotated:
        return rounded(keys, span, form)
    return turned(rounded(turned(keys, -1), span, form), 1)


def reference_logits(checkpoint: Path, ids: Ids, ranges: dict[str, CacheRange], form: str) -> Floats:
    """Of transformers, every key and value rounded before attention sees it."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layer, groups = module.layer_idx, query.shape[1] // key.shape[1]
        key = cached_keys(key, ranges[past_key(layer)], form).repeat_interleave(groups, dim=1)
        value = rounded(value, ranges[past_value(layer)], form).repeat_interleave(groups, dim=1)
        scores = query @ key.transpose(2, 3) * scaling
        length = scores.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        window = others.get("sliding_window")
        if window is not None:
            visible &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("rounded_cache", attend)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="rounded_cache"
    ).eval()
    with torch.no_grad():
        logits: Floats = model(torch.from_numpy(ids)).logits.numpy()
    return logits


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    cached: Callable[..., Bundle],
    teacher_forced: Callable[..., Floats],
    family: str,
    cache_scheme: CacheScheme,
) -> None:
    checkpoint = tiny_checkpoint(family, **(WINDOWED if family == "mistral" else {}))
    bundle = cached(exported(checkpoint, dtype="float32"), cache_scheme)
    ids = np.random.default_rng(5).integers(0, 97, (2, 30))
    expected = reference_logits(checkpoint, ids, ranges_of(bundle), cache_scheme.format)
    # Past and new keys in every proportion: prefilled at once, in chunks, decoded.
    found = teacher_forced(OrtSession(bundle, threads=1), ids, [7, 9, 2, 4, *[1] * 8])
    errors = np.abs(found - expected)
    assert float(errors.mean()) < MEAN_TOLERANCE
    assert float(errors.max()) < MOST_TOLERANCE


@pytest.mark.parametrize("text", ["stories", "novel"])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_trained_model_keeps_its_perplexity(
    stories: Bundle,
    calibrated: Callable[..., Bundle],
    perplexity: Callable[[Bundle], float],
    shared_data: Path,
    text: str,
    form: Any,
) -> None:
    recipe = with_cache(float_plan(), form).prefill.recipe
    file = shared_data / "text" / "botchan_en.txt" if text == "novel" else None
    bundle = calibrated(stories, recipe, file=file)
    assert perplexity(bundle) == pytest.approx(FLOAT_PERPLEXITY, rel=0.005)
