"""What BART and its kin have in common: keys of config.json, layers with norms behind each sum, names of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Head, Prelude
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig, read_decoding, shared_head_dim
from kvgraph.models.family import Into
from kvgraph.models.layer_norm_decoder import renamed
from kvgraph.models.layers import Cast, Embedding, Precision
from kvgraph.models.post_norm_encoder_decoder import post_norm_encoder_decoder

EMBEDDING = "model.embed_tokens.weight"
# Of every layer norm; torch's own, which no config of these families names.
LAYER_NORM_EPS = 1e-5
# Training's business, and keys of old files without a function.
WITHOUT_EFFECT = (
    "_num_labels",
    "activation_dropout",
    "add_bias_logits",
    "classif_dropout",
    "decoder_layerdrop",
    "dropout",
    "encoder_layerdrop",
    "init_std",
    "output_past",
    "replacing_rate",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BartConfig(EncoderDecoderConfig):
    """The configuration of BART and its kin.

    Attributes:
        scale_embedding: Whether token embeddings are multiplied by sqrt(E).
    """

    scale_embedding: bool

    @property
    def embedding_scale(self) -> float:
        """Factor on token embeddings."""
        return math.sqrt(self.hidden_size) if self.scale_embedding else 1.0


def read_bart(reader: ConfigReader, **defaults: Any) -> dict[str, Any]:
    """The fields of `BartConfig`; `defaults` are those of `read_decoding`.

    Raises:
        ValueError: A key is missing, malformed or contradicts another.
    """
    reader.require("is_encoder_decoder", True, "the model has an encoder")
    size, vocab_size = reader.integer("d_model"), reader.integer("vocab_size")
    layers = {side: reader.integer(f"{side}_layers") for side in ("encoder", "decoder")}
    heads = {side: reader.integer(f"{side}_attention_heads") for side in ("encoder", "decoder")}
    dims = {side: shared_head_dim(reader, size, heads[side], f"{side}_attention_heads") for side in heads}
    reader.require("num_hidden_layers", layers["encoder"], "it is another word for encoder_layers")
    decoding = read_decoding(reader, **defaults)
    if reader.flag("force_bos_token_to_be_generated", default=False):
        reader.require("forced_bos_token_id", decoding["bos_token_id"], "force_bos_token_to_be_generated")
        decoding["forced_bos_token_id"] = decoding["bos_token_id"]
    reader.require(
        "tie_word_embeddings",
        True,
        "libraries differ in which of the other tables are one where the head is not",
    )
    reader.ignore(*WITHOUT_EFFECT)
    return {
        **decoding,
        "model_type": reader.text("model_type"),
        "vocab_size": vocab_size,
        "source_vocab_size": vocab_size,
        "hidden_size": size,
        "intermediate_size": reader.integer("decoder_ffn_dim"),
        "num_hidden_layers": layers["decoder"],
        "num_attention_heads": heads["decoder"],
        "num_key_value_heads": heads["decoder"],
        "head_dim": dims["decoder"],
        "max_position_embeddings": reader.integer("max_position_embeddings"),
        "hidden_act": reader.text("activation_function", default="gelu"),
        "tie_word_embeddings": True,
        "encoder_layers": layers["encoder"],
        "encoder_attention_heads": heads["encoder"],
        "encoder_head_dim": dims["encoder"],
        "encoder_ffn_dim": reader.integer("encoder_ffn_dim"),
        "scale_embedding": reader.flag("scale_embedding", default=False),
    }


class BiasedHead(Head):
    """A tied head whose logits get a bias."""

    def __init__(self, norm: nn.Module, embed_tokens: Embedding) -> None:
        """See `Head`."""
        super().__init__(norm, None, embed_tokens)
        rows = embed_tokens.weight.shape[0]
        # The checkpoint's shape.
        self.final_logits_bias = nn.Parameter(torch.empty(1, rows, dtype=torch.float32))

    def forward(self, hidden_states: Tensor, logit_positions: Tensor | None = None) -> Tensor:
        """See `Head`."""
        return super().forward(hidden_states, logit_positions) + self.final_logits_bias


def build_bart(
    config: BartConfig, precision: Precision, source_prelude: Prelude, prelude: Prelude
) -> EncoderDecoder:
    """The module around the two preludes, whose tables may be one."""
    head = BiasedHead(Cast(precision.compute), prelude.embed_tokens)
    return post_norm_encoder_decoder(
        config, precision, source_prelude, prelude, head, epsilon=LAYER_NORM_EPS, attention_bias=True
    )


def bart_names() -> dict[str, Into]:
    """The checkpoint's names of everything but embeddings."""
    attention = {**{f"{letter}_proj": f"{letter}_proj" for letter in "qkv"}, "out_proj": "o_proj"}
    common = {
        **_inside("self_attn", "self_attn", attention),
        "self_attn_layer_norm": "self_attn_norm",
        "fc1": "mlp.up_proj",
        "fc2": "mlp.down_proj",
        "final_layer_norm": "mlp_norm",
    }
    cross = {**_inside("encoder_attn", "cross_attn", attention), "encoder_attn_layer_norm": "cross_attn_norm"}
    return {
        "lm_head.weight": "lm_head.weight",
        "final_logits_bias": "model.final_logits_bias",
        **renamed(common, "model.encoder.layers.{j}.", "model.encoder.layers.{j}."),
        **renamed({**common, **cross}, "model.decoder.layers.{i}.", "model.layers.{i}."),
    }


def _inside(theirs: str, ours: str, modules: Mapping[str, str]) -> dict[str, str]:
    return {f"{theirs}.{source}": f"{ours}.{module}" for source, module in modules.items()}
