"""The pre-norm decoder of the tutorials: RMS norms, rotary positions, a SwiGLU feed-forward part, no biases.

For people who wrote their own. The checkpoint is a directory with model.safetensors and this config.json:

    {
      "model_type": "pre_norm_decoder",
      "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408,
      "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
      "max_position_embeddings": 1024,
      "rms_norm_eps": 1e-5, "eps_inside_root": true,
      "rope_theta": 10000.0, "rope_interleaved": true,
      "tie_word_embeddings": false
    }

`eps_inside_root` tells x / sqrt(mean(x^2) + eps) from x / (sqrt(mean(x^2)) + eps); `rope_interleaved` whether the pairs
that turn are neighbours, (2r, 2r + 1), or half a head apart, (r, r + D / 2). Left out, `num_key_value_heads` is
`num_attention_heads`, `head_dim` their share of `hidden_size`, and `hidden_act` "silu"; `bos_token_id`, `eos_token_id`,
`dtype` and `rope_scaling` are read as for Llama.

| tensor | shape |
|---|---|
| `embed.weight` | [V, E] |
| `blocks.{i}.attn_norm.weight`, `blocks.{i}.ffn_norm.weight`, `norm.weight` | [E] |
| `blocks.{i}.attn.wq.weight` | [H * D, E] |
| `blocks.{i}.attn.wk.weight`, `blocks.{i}.attn.wv.weight` | [K * D, E] |
| `blocks.{i}.attn.wo.weight` | [E, H * D] |
| `blocks.{i}.ffn.w1.weight` (gate), `blocks.{i}.ffn.w2.weight` (up) | [F, E] |
| `blocks.{i}.ffn.w3.weight` (down) | [E, F] |
| `head.weight`, unless tied | [V, E] |

A layer is x = x + attn(attn_norm(x)), x = x + ffn(ffn_norm(x)) with ffn(x) = w3(silu(w1 x) * w2 x).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, Head, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.layers import Attention, Embedding, GatedMLP, Linear, Precision, RMSNorm
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rope import RopeConfig, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class PreNormConfig(ModelConfig):
    """The pre-norm decoder's configuration.

    Attributes:
        rms_norm_eps: Epsilon of every RMS norm.
        eps_inside_root: Whether it is added to the mean of the squares, or to its root.
        rope: The rotary embedding.
        rope_interleaved: Whether the pairs that turn are neighbours.
    """

    rms_norm_eps: float
    eps_inside_root: bool
    rope: RopeConfig
    rope_interleaved: bool

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        return self.rope.stretched(self.max_position_embeddings)


def config_from_hf(hf: Mapping[str, Any]) -> PreNormConfig:
    """Read the config.json of the module docstring.

    Raises:
        ValueError: A key is missing, malformed or unknown.
    """
    reader = ConfigReader(hf)
    tied = reader.flag("tie_word_embeddings")
    common = read_common(reader, hidden_act="silu", tie_word_embeddings=tied)
    config = PreNormConfig(
        **common,
        rms_norm_eps=reader.number("rms_norm_eps"),
        eps_inside_root=reader.flag("eps_inside_root"),
        rope=read_rope(reader, common["head_dim"]),
        rope_interleaved=reader.flag("rope_interleaved"),
    )
    reader.refuse_unread(config.model_type)
    return config


class RootPlusEpsNorm(nn.Module):
    """x / (sqrt(mean(x^2)) + eps) * weight, in float32 whatever comes in; returns `out_dtype`."""

    def __init__(self, size: int, eps: float, out_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.eps = eps
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        x = x.to(torch.float32)
        root = x.square().mean(-1, keepdim=True).sqrt()
        return (x / (root + self.eps) * self.weight).to(self.out_dtype)


def norm(config: PreNormConfig, precision: Precision) -> RMSNorm | RootPlusEpsNorm:
    """Either norm over the residual stream."""
    kind = RMSNorm if config.eps_inside_root else RootPlusEpsNorm
    return kind(config.hidden_size, config.rms_norm_eps, precision.compute)


def layer(config: PreNormConfig, precision: Precision) -> SequentialLayer:
    """A layer."""
    return SequentialLayer(
        norm(config, precision),
        Attention(config, precision, qkv_bias=False, out_bias=False, interleaved=config.rope_interleaved),
        norm(config, precision),
        GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, False, precision),
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, PreNormConfig)
    compute, size = precision.compute, config.hidden_size
    embed_tokens = Embedding(config.vocab_size, size, compute)
    lm_head = None if config.tie_word_embeddings else Linear(size, config.vocab_size, False, compute)
    rotary = Rotary(config.rope, config.head_dim, compute)
    return Decoder(
        config,
        precision,
        Prelude(embed_tokens, [CausalMask(), rotary], precision.residual),
        [layer(config, precision) for _ in range(config.num_hidden_layers)],
        Head(norm(config, precision), lm_head, embed_tokens),
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The names of the module docstring."""
    modules = {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "blocks.{i}.attn_norm": "model.layers.{i}.input_layernorm",
        "blocks.{i}.ffn_norm": "model.layers.{i}.post_attention_layernorm",
        **{f"blocks.{{i}}.attn.w{name}": f"model.layers.{{i}}.self_attn.{name}_proj" for name in "qkvo"},
        "blocks.{i}.ffn.w1": "model.layers.{i}.mlp.gate_proj",
        "blocks.{i}.ffn.w2": "model.layers.{i}.mlp.up_proj",
        "blocks.{i}.ffn.w3": "model.layers.{i}.mlp.down_proj",
    }
    return {f"{source}.weight": f"{module}.weight" for source, module in modules.items()}


FAMILY = Family("pre_norm_decoder", config_from_hf, build, weight_names)
