"""MPT: ALiBi in place of positions, layer norms without a bias, no bias anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgraph.models.alibi import ALIBI_BIAS_MAX, AlibiMask
from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.fused_qkv import qkv_parts, stacked_ranges
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import LAYER, layer_norm_decoder, token_embedding
from kvgraph.models.layers import MLP, Attention, Linear, Precision
from kvgraph.models.residual_layers import SequentialLayer

ALIASES = {
    "hidden_size": ("d_model",),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "max_position_embeddings": ("max_seq_len",),
}
WITHOUT_EFFECT = (
    # Dropout, initialization and training.
    "emb_pdrop",
    "embedding_fraction",
    "init_config",
    "init_device",
    "verbose",
    # ALiBi, which is required, switches it off.
    "learned_pos_emb",
    "tokenizer_name",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MptConfig(ModelConfig):
    """MPT's configuration.

    Attributes:
        layer_norm_epsilon: Epsilon of every layer norm.
        softmax_scale: Factor on the scores; None for 1 / sqrt(D).
        clip_qkv: Largest magnitude of a query, key or value, beyond which it is clipped; None for no limit.
    """

    layer_norm_epsilon: float
    softmax_scale: float | None
    clip_qkv: float | None


def config_from_hf(hf: Mapping[str, Any]) -> MptConfig:
    """Read an `mpt` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf, aliases=ALIASES)
    expansion = reader.integer("expansion_ratio", default=4)
    common = read_common(
        reader,
        # The file does not say, for there is only one.
        hidden_act="gelu",
        tie_word_embeddings=True,
        intermediate_size=expansion * reader.integer("hidden_size"),
    )
    reader.require("no_bias", True, "biases are not implemented for this family")
    reader.require("logit_scale", None, "scaled logits are not implemented for this family")
    if reader.value("norm_type") != "layernorm":
        reader.require(
            "norm_type", "low_precision_layernorm", "another norm is not implemented for this family"
        )
    scale, clip = read_attention(reader.section("attn_config") or ConfigReader({}))
    config = MptConfig(
        **common,
        layer_norm_epsilon=reader.number("layer_norm_epsilon", default=1e-5),
        softmax_scale=scale,
        clip_qkv=clip,
    )
    reader.ignore(*WITHOUT_EFFECT)
    reader.accept_auto_map("MPTForCausalLM")
    reader.refuse_unread(config.model_type)
    return config


def read_attention(reader: ConfigReader) -> tuple[float | None, float | None]:
    """`softmax_scale` and `clip_qkv` of the object `attn_config`; whatever else changes attention is refused."""
    reader.require("alibi", True, "position embeddings are not implemented for this family")
    reader.require("alibi_bias_max", ALIBI_BIAS_MAX, "transformers computes no other slopes either")
    reader.require("attn_type", "multihead_attention", "another kind is not implemented for this family")
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        reader.require(key, False, "it is not implemented for this family")
    reader.ignore("attn_impl")
    scale, clip = reader.optional_number("softmax_scale"), reader.optional_number("clip_qkv")
    reader.refuse_unread("mpt")
    return scale, clip


class ClippedLinear(Linear):
    """A linear layer whose output stays within [-limit, limit]."""

    def __init__(self, in_features: int, out_features: int, limit: float, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, False, dtype)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return super().forward(x).clamp(-self.limit, self.limit)


class MptAttention(Attention):
    """Attention without biases; queries, keys and values are clipped where the config asks for it."""

    def __init__(self, config: MptConfig, precision: Precision) -> None:
        super().__init__(config, precision, qkv_bias=False, out_bias=False, scale=config.softmax_scale)
        if (limit := config.clip_qkv) is not None:
            size = config.hidden_size
            self.q_proj, self.k_proj, self.v_proj = (
                ClippedLinear(size, size, limit, precision.compute) for _ in range(3)
            )


def layer(config: MptConfig, precision: Precision) -> SequentialLayer:
    """A layer."""
    compute, size, epsilon = precision.compute, config.hidden_size, config.layer_norm_epsilon
    return SequentialLayer(
        LayerNorm(size, epsilon, compute, bias=False),
        MptAttention(config, precision),
        LayerNorm(size, epsilon, compute, bias=False),
        MLP(size, config.intermediate_size, config.hidden_act, False, precision),
        shared=AlibiMask.names,
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, MptConfig)
    alibi = AlibiMask(config.num_attention_heads, precision.compute)
    prelude = Prelude(token_embedding(config, precision), [alibi], precision.residual)
    layers = [layer(config, precision) for _ in range(config.num_hidden_layers)]
    return layer_norm_decoder(config, precision, prelude, layers, config.layer_norm_epsilon, norm_bias=False)


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Queries, keys and values are one fused tensor."""
    layer = "transformer.blocks.{i}."
    modules = {
        "attn.out_proj": "self_attn.o_proj",
        "ffn.up_proj": "mlp.up_proj",
        "ffn.down_proj": "mlp.down_proj",
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
    }
    return {
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.norm_f.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
        layer + "attn.Wqkv.weight": qkv_parts(stacked_ranges(config), LAYER, "weight"),
        **{f"{layer}{source}.weight": f"{LAYER}{module}.weight" for source, module in modules.items()},
    }


FAMILY = Family("mpt", config_from_hf, build, weight_names)
