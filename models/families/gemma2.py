"""Gemma 2: soft caps on scores and logits, windows in every other layer, norms before and after each branch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, DecoderLayer
from kvgraph.models.families.gemma import embedding_scale, shifted_norms
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_types import FULL, SLIDING, check_window, read_layer_types
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import Rotary, masks, suffix
from kvgraph.models.rms_decoder import (
    GATED_MLP,
    PRE_NORMS,
    QKVO,
    RMSConfig,
    gated_mlp,
    read_rms,
    rms_decoder,
    same_names,
)
from kvgraph.models.rope import read_rope

SANDWICH_NORMS = (*PRE_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(RMSConfig):
    """Gemma 2's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
        query_pre_attn_scalar: Scores are divided by its square root, in place of head_dim's.
        attn_logit_softcapping: Scores become cap * tanh(score / cap); None leaves them.
        final_logit_softcapping: The same for logits.
        layer_types: full_attention or sliding_attention, for each layer.
        sliding_window: How many tokens one sees in a sliding layer, itself included.
    """

    attention_bias: bool
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    layer_types: tuple[str, ...]
    sliding_window: int | None


def config_from_hf(hf: Mapping[str, Any]) -> Gemma2Config:
    """Read a `gemma2` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    # The first files carry the activation and the window under two names each.
    reader = ConfigReader(
        hf,
        aliases={"hidden_act": ("hidden_activation",), "sliding_window": ("sliding_window_size",)},
    )
    head_dim = reader.integer("head_dim")
    # Published files leave out that the head is tied, and the layer types.
    common = read_rms(reader, tie_word_embeddings=True)
    layers = common["num_hidden_layers"]
    alternating = tuple(FULL if layer % 2 else SLIDING for layer in range(layers))
    layer_types = read_layer_types(reader, layers) or alternating
    sliding_window = reader.optional_integer("sliding_window")
    check_window(reader, layer_types, sliding_window)
    reader.refuse_unstated("attn_logit_softcapping", "final_logit_softcapping")
    config = Gemma2Config(
        **common,
        attention_bias=reader.flag("attention_bias", default=False),
        query_pre_attn_scalar=reader.number("query_pre_attn_scalar"),
        attn_logit_softcapping=reader.optional_number("attn_logit_softcapping"),
        final_logit_softcapping=reader.optional_number("final_logit_softcapping"),
        layer_types=layer_types,
        sliding_window=sliding_window,
        rope=read_rope(reader, head_dim),
    )
    reader.refuse_unread(config.model_type)
    return config


class CappedAttention(Attention):
    """Attention whose scores are soft-capped, written out: TensorRT rejects `Attention` with a cap."""

    def __init__(self, config: Gemma2Config, precision: Precision, softcap: float) -> None:
        bias, scale = config.attention_bias, config.query_pre_attn_scalar**-0.5
        super().__init__(config, precision, qkv_bias=bias, out_bias=bias, scale=scale)
        self.softcap = softcap

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """See `Attention.attend`; the mask is [B, 1, S, T] bool.

        The H / K query heads that read a key/value head become rows of one product with it, so that keys and values
        are neither repeated nor read twice. Scores are float32 between the two products.
        """
        batch, heads, new_tokens, head_dim = query.shape
        kv_heads, slots = key.shape[1:3]
        groups = heads // kv_heads
        rows = (query * self.scale).contiguous().view(batch, kv_heads, groups * new_tokens, head_dim)
        scores = torch.matmul(rows, key.transpose(-1, -2)).to(torch.float32)
        scores = torch.tanh(scores / self.softcap) * self.softcap
        # The axis of one keeps T at its place in both reshapes, so that their targets are constants.
        scores = scores.unsqueeze(2).view(batch, kv_heads, groups, new_tokens, slots)
        scores = torch.where(mask.unsqueeze(2), scores, torch.finfo(torch.float32).min)
        weights = torch.softmax(scores, dim=-1).to(value.dtype)
        weights = weights.view(batch, kv_heads, 1, groups * new_tokens, slots).squeeze(2)
        attended = torch.matmul(weights, value).view(batch, kv_heads, groups, new_tokens, head_dim)
        return attended.flatten(1, 2)


class SandwichLayer(DecoderLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))): Gemma's layer from its second version on."""

    def __init__(
        self,
        config: RMSConfig,
        precision: Precision,
        self_attn: Attention,
        mlp: nn.Module,
        *,
        kind: str,
        shared: tuple[str, ...],
    ) -> None:
        """Put norms around `self_attn` and `mlp`; `kind` and `shared` as `DecoderLayer` has them."""
        super().__init__()
        self.kind = kind
        self.shared = shared
        self.kv_shape = self_attn.kv_shape
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, precision.compute)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(size, eps, precision.residual)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, precision.compute)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(size, eps, precision.residual)

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderLayer`."""
        normed = self.input_layernorm(hidden_states)
        attended, key, value = self.self_attn(normed, past_length, past_key, past_value, *shared)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(fed_forward), key, value


def attention(config: Gemma2Config, precision: Precision) -> Attention:
    """Attention with or without a cap, as `config` says."""
    if config.attn_logit_softcapping is not None:
        return CappedAttention(config, precision, config.attn_logit_softcapping)
    bias, scale = config.attention_bias, config.query_pre_attn_scalar**-0.5
    return Attention(config, precision, qkv_bias=bias, out_bias=bias, scale=scale)


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Gemma2Config)
    compute = precision.compute

    def layer(layer_type: str) -> SandwichLayer:
        return SandwichLayer(
            config,
            precision,
            attention(config, precision),
            gated_mlp(config, precision),
            kind=layer_type,
            shared=(f"mask{suffix(layer_type)}", "cos", "sin"),
        )

    return rms_decoder(
        config,
        precision,
        [*masks(config.layer_types, config.sliding_window), Rotary(config.rope, config.head_dim, compute)],
        [layer(layer_type) for layer_type in config.layer_types],
        embedding_scale=embedding_scale(config.hidden_size, compute),
        logit_softcap=config.final_logit_softcapping,
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own; norms get their one added."""
    return {**same_names([*QKVO, *GATED_MLP]), **shifted_norms(SANDWICH_NORMS)}


FAMILY = Family("gemma2", config_from_hf, build, weight_names)
