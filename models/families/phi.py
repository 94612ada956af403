"""Phi-1, 1.5 and 2: partial rotary positions, attention and feed-forward side by side behind one layer norm, biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import LAYER, layer_norm_decoder, renamed, token_embedding
from kvgraph.models.layers import MLP, Attention, Precision
from kvgraph.models.positions import CausalMask, Rotary, Shared
from kvgraph.models.residual_layers import ParallelLayer
from kvgraph.models.rope import RopeConfig, read_partial_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiConfig(ModelConfig):
    """Phi's configuration.

    Attributes:
        layer_norm_eps: Epsilon of every layer norm.
        qk_layernorm: Whether queries and keys are normed, each head by itself.
        rope: The rotary embedding.
        rotary_dim: How many dimensions of a head it rotates, the first ones.
    """

    layer_norm_eps: float
    qk_layernorm: bool
    rope: RopeConfig
    rotary_dim: int

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        return self.rope.stretched(self.max_position_embeddings)


def config_from_hf(hf: Mapping[str, Any]) -> PhiConfig:
    """Read a `phi` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf)
    reader.require("tie_word_embeddings", False, "a tied head with a bias is not implemented")
    common = read_common(reader, bos_token_id=1, eos_token_ids=(2,))
    rope, rotary_dim = read_partial_rope(reader, common["head_dim"])
    config = PhiConfig(
        **common,
        layer_norm_eps=reader.number("layer_norm_eps"),
        qk_layernorm=reader.flag("qk_layernorm", default=False),
        rope=rope,
        rotary_dim=rotary_dim,
    )
    reader.refuse_unread(config.model_type)
    return config


class PhiAttention(Attention):
    """Attention with biases, and perhaps a layer norm over the query and the key of each head."""

    def __init__(self, config: PhiConfig, precision: Precision) -> None:
        super().__init__(config, precision, qkv_bias=True, out_bias=True)
        normed = config.qk_layernorm
        self.q_norm = LayerNorm(self.head_dim, config.layer_norm_eps, precision.compute) if normed else None
        self.k_norm = LayerNorm(self.head_dim, config.layer_norm_eps, precision.compute) if normed else None

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention`."""
        query, key = super().queries_and_keys(x)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key


def layer(config: PhiConfig, precision: Precision) -> ParallelLayer:
    """A layer whose two branches read the same norm."""
    compute, size = precision.compute, config.hidden_size
    return ParallelLayer(
        LayerNorm(size, config.layer_norm_eps, compute),
        PhiAttention(config, precision),
        None,
        MLP(size, config.intermediate_size, config.hidden_act, True, precision),
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, PhiConfig)
    shared: list[Shared] = [CausalMask(), Rotary(config.rope, config.rotary_dim, precision.compute)]
    prelude = Prelude(token_embedding(config, precision), shared, precision.residual)
    layers = [layer(config, precision) for _ in range(config.num_hidden_layers)]
    return layer_norm_decoder(config, precision, prelude, layers, config.layer_norm_eps, head_bias=True)


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Llama's names, save for some."""
    same = [f"self_attn.{name}_proj" for name in "qkv"] + ["input_layernorm"]
    modules = {
        "self_attn.dense": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
    }
    return {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        **renamed({"model.final_layernorm": "model.norm", "lm_head": "lm_head"}),
        **renamed({**{name: name for name in same}, **modules}, LAYER, LAYER),
    }


FAMILY = Family("phi", config_from_hf, build, weight_names)
