"""Llama: pre-norm decoder, rotary attention with grouped key/value heads, gated SiLU feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, DecoderLayer, Head, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.layers import Attention, Embedding, GatedMLP, Linear, Precision, RMSNorm
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.rope import RopeConfig, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """Llama's configuration.

    Attributes:
        rms_norm_eps: Epsilon of every RMS norm.
        attention_bias: Whether the q, k, v and o projections have biases.
        mlp_bias: Whether the gate, up and down projections have biases.
        rope: The rotary embedding.
    """

    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig

    @property
    def max_positions(self) -> int:
        """These two rope types leave `max_position_embeddings` at the trained length."""
        stretched = self.rope.rope_type in ("linear", "dynamic")
        factor = self.rope.factor if stretched and self.rope.factor is not None else 1
        return int(self.max_position_embeddings * factor)


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """Read a `llama` config.json.

    Defaults are those of transformers' LlamaConfig, and only for keys that published checkpoints leave out.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    common = read_common(reader, hidden_act="silu", bos_token_id=1, eos_token_ids=(2,))
    config = LlamaConfig(
        **common,
        rms_norm_eps=reader.number("rms_norm_eps"),
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=reader.flag("mlp_bias", default=False),
        rope=read_rope(reader, common["head_dim"], default_theta=10000.0),
    )
    reader.refuse_unread(config.model_type)
    return config


class LlamaLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LlamaConfig, precision: Precision) -> None:
        super().__init__()
        compute = precision.compute
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, compute)
        self.self_attn = Attention(
            config, compute, qkv_bias=config.attention_bias, out_bias=config.attention_bias
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, compute)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias, compute
        )

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderLayer`."""
        attended, key, value = self.self_attn(
            self.input_layernorm(hidden_states), past_length, past_key, past_value, *shared
        )
        hidden_states = hidden_states + attended.to(hidden_states.dtype)
        fed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + fed_forward.to(hidden_states.dtype), key, value


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, LlamaConfig)
    compute = precision.compute
    embed_tokens = Embedding(config.vocab_size, config.hidden_size, compute)
    tied = config.tie_word_embeddings
    lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, False, compute)
    return Decoder(
        config,
        precision,
        Prelude(
            embed_tokens,
            [CausalMask(), Rotary(config.rope, config.head_dim, compute)],
            precision.residual,
        ),
        [LlamaLayer(config, precision) for _ in range(config.num_hidden_layers)],
        Head(RMSNorm(config.hidden_size, config.rms_norm_eps, compute), lm_head, embed_tokens),
    )


LAYER = "model.layers.{i}."


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    same = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    parts = [*norms, *(f"{linear}.{kind}" for linear in linears for kind in ("weight", "bias"))]
    names: dict[str, Into] = {name: name for name in (*same, *(LAYER + part for part in parts))}
    # Old checkpoints carry the rotary table, which the config determines.
    return {**names, LAYER + "self_attn.rotary_emb.inv_freq": None}


FAMILY = Family("llama", config_from_hf, build, weight_names)
