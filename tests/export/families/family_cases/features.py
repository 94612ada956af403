"""What a case has, in words: read from the module that its config builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvgraph.models.alibi import AlibiMask
from kvgraph.models.config import ModelConfig
from kvgraph.models.encoder_decoder import EncoderDecoder, Model
from kvgraph.models.encoder_decoder_layers import PostNormCrossLayer
from kvgraph.models.experts import ExpertsMLP
from kvgraph.models.families.gemma2 import SandwichLayer
from kvgraph.models.families.olmo2 import Olmo2Layer
from kvgraph.models.families.post_norm_decoder import PostNormLayer
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.relative_bias import RelativeBias
from kvgraph.models.residual_layers import ParallelLayer


def features_of(config: ModelConfig) -> list[str]:
    """Short names of what a checkpoint with this config has."""
    with torch.device("meta"):
        model = family(config.model_type).build(config, Precision(torch.float32, torch.float32))
    return [*heads(config), *positions(model, config), *windows(model), *parts(model, config)]


def heads(config: ModelConfig) -> Iterator[str]:
    """How heads share keys."""
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    yield "MHA" if queries == keys else "MQA" if keys == 1 else "GQA"


def positions(model: Model, config: ModelConfig) -> list[str]:
    """How the model knows where a token stands."""
    shared = model.prelude.shared
    ropes = [part for part in shared if isinstance(part, Rotary)]
    kinds = dict.fromkeys(part.rope.rope_type for part in ropes)
    found = [{"default": "rope", "longrope": "longrope"}.get(kind, f"{kind} rope") for kind in kinds]
    if any(rope.rotary_dim < config.head_dim for rope in ropes):
        found.append("partial rotary")
    if any(getattr(module, "interleaved", False) for module in model.modules()):
        found.append("interleaved rotary")
    if ropes and any(not any("cos" in name for name in names) for names in model.layer_shared):
        found.append("layers without rope")
    if any(isinstance(part, AlibiMask) for part in shared):
        found.append("ALiBi")
    if any(isinstance(part, RelativeBias) for part in shared):
        found.append("relative bias")
    if hasattr(model.prelude, "embed_positions"):
        found.append("learned positions")
    # What is computed and added to the embedding stands in no list of parts.
    return found or ["sinusoidal positions"]


def windows(model: Model) -> Iterator[str]:
    """Whether some layers see the last tokens alone."""
    masks = [part for part in model.prelude.shared if isinstance(part, CausalMask)]
    if any(mask.window is not None for mask in masks):
        yield "window" if len(masks) == 1 else "window in some layers"


def parts(model: Model, config: ModelConfig) -> Iterator[str]:
    """How layers are made, and what stands before and behind them."""
    names = model.weights()
    experts = [module for module in model.modules() if isinstance(module, ExpertsMLP)]
    yield from (
        name
        for name, is_so in {
            "q/k norm": any("q_norm" in name for name in names),
            "soft caps": bool(setting(config, "attn_logit_softcapping")),
            "clipped q/k/v": bool(setting(config, "clip_qkv")),
            **{f"MoE {module.gate.top_k} of {module.experts.num_experts}": True for module in experts},
            "shared expert": any(module.shared_expert is not None for module in experts),
            "parallel branches": has_layers(model, ParallelLayer),
            "sandwich norms": has_layers(model, SandwichLayer),
            "norms behind branches": has_layers(model, Olmo2Layer),
            "post-norm": has_layers(model, PostNormLayer, PostNormCrossLayer),
            "eps outside the root": setting(config, "eps_inside_root") is False,
            "biases": any(name.endswith("q_proj.bias") for name in names),
            "scaled embeddings": model.prelude.embedding_scale != 1.0,
            "scaled residuals": setting(config, "residual_multiplier") is not None,
            "scaled logits": model.head.scale != 1.0,
            "tied head": model.head.lm_head is None,
            "two vocabularies": isinstance(model, EncoderDecoder)
            and getattr(config, "source_vocab_size", config.vocab_size) != config.vocab_size,
        }.items()
        if is_so
    )


def has_layers(model: Model, *kinds: type) -> bool:
    """Whether the decoder's layers are of one of these classes."""
    return isinstance(model.layers[0], kinds)


def setting(config: ModelConfig, name: str) -> Any:
    """What a family's own configuration says; None where it has no such field."""
    return getattr(config, name, None)
