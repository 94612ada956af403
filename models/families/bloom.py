"""BLOOM: ALiBi in place of positions, a layer norm behind the embedding, layer norms, biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgraph.models.alibi import AlibiMask
from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.fused_qkv import grouped_ranges, qkv_parts
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import LAYER, layer_norm_decoder, renamed, token_embedding
from kvgraph.models.layers import MLP, Attention, Embedding, Precision
from kvgraph.models.positions import Shared
from kvgraph.models.residual_layers import SequentialLayer

ALIASES = {
    "hidden_size": ("n_embed",),
    "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("seq_length",),
}
# How the training code went about the same computation.
WITHOUT_EFFECT = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig(ModelConfig):
    """BLOOM's configuration.

    Attributes:
        layer_norm_epsilon: Epsilon of every layer norm.
    """

    layer_norm_epsilon: float


def config_from_hf(hf: Mapping[str, Any]) -> BloomConfig:
    """Read a `bloom` config.json; defaults as in `llama.config_from_hf`.

    The family has no table of positions: where the file does not name `seq_length`, the limit is the 2048 tokens that
    its models were trained on.
    """
    reader = ConfigReader(hf, aliases=ALIASES)
    common = read_common(
        reader,
        # The file does not say, for there is only one.
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
        intermediate_size=4 * reader.integer("hidden_size"),
        max_position_embeddings=2048,
    )
    config = BloomConfig(**common, layer_norm_epsilon=reader.number("layer_norm_epsilon"))
    reader.require("apply_residual_connection_post_layernorm", False, "that arrangement is not implemented")
    reader.ignore(*WITHOUT_EFFECT)
    reader.refuse_unread(config.model_type)
    return config


class BloomPrelude(Prelude):
    """Token embedding, then a layer norm."""

    def __init__(
        self, embed_tokens: Embedding, epsilon: float, shared: Sequence[Shared], residual: torch.dtype
    ) -> None:
        super().__init__(embed_tokens, shared, residual)
        self.embed_layernorm = LayerNorm(embed_tokens.weight.shape[1], epsilon, residual)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Prelude.embed`."""
        normed: Tensor = self.embed_layernorm(super().embed(input_ids, positions))
        return normed


def layer(config: BloomConfig, precision: Precision) -> SequentialLayer:
    """A layer."""
    compute, size, epsilon = precision.compute, config.hidden_size, config.layer_norm_epsilon
    return SequentialLayer(
        LayerNorm(size, epsilon, compute),
        Attention(config, precision, qkv_bias=True, out_bias=True),
        LayerNorm(size, epsilon, compute),
        MLP(size, config.intermediate_size, config.hidden_act, True, precision),
        shared=AlibiMask.names,
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, BloomConfig)
    epsilon = config.layer_norm_epsilon
    alibi = AlibiMask(config.num_attention_heads, precision.compute)
    prelude = BloomPrelude(token_embedding(config, precision), epsilon, [alibi], precision.residual)
    layers = [layer(config, precision) for _ in range(config.num_hidden_layers)]
    return layer_norm_decoder(config, precision, prelude, layers, epsilon)


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Query, key and value of one head lie behind another in a fused tensor."""
    layer, ranges = "transformer.h.{i}.", grouped_ranges(config)
    modules = {
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    norms = {"word_embeddings_layernorm": "embed_layernorm", "ln_f": "norm"}
    return {
        "transformer.word_embeddings.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        **renamed(norms, "transformer.", "model."),
        **renamed(modules, layer, LAYER),
        **{
            f"{layer}self_attention.query_key_value.{kind}": qkv_parts(ranges, LAYER, kind)
            for kind in ("weight", "bias")
        },
    }


FAMILY = Family("bloom", config_from_hf, build, weight_names, base_prefix="transformer.")
