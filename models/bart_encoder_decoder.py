"""What BART and its kin have in common: keys of config.json, embeddings, layers, head, names of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.cross_attention import SourceMask
from kvgraph.models.decoder import Head, Prelude
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig, read_decoding, shared_head_dim
from kvgraph.models.family import Into
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import renamed
from kvgraph.models.layer_norm_encoder_decoder import layer_norm_encoder_decoder
from kvgraph.models.layers import Cast, Embedding, Linear, Precision
from kvgraph.models.positions import CausalMask, Shared

EMBEDDING = "model.embed_tokens.weight"
# Of every layer norm; torch's own, which no config of these families names.
LAYER_NORM_EPS = 1e-5
# The table of learned positions begins with two rows that no position reads.
POSITION_OFFSET = 2
LEARNED_POSITIONS: dict[str, Into] = {
    "model.encoder.embed_positions.weight": "model.encoder.embed_positions.weight",
    "model.decoder.embed_positions.weight": "model.embed_positions.weight",
}
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


def read_bart(
    reader: ConfigReader,
    name: str,
    fixed: Mapping[str, Any],
    *,
    activation: str = "gelu",
    scale_embedding: bool = False,
    **defaults: Any,
) -> dict[str, Any]:
    """The fields of `BartConfig`.

    Args:
        reader: config.json.
        name: Of the architecture, to be named in errors.
        fixed: Keys by which old files spell what it is; with other values they describe another one.
        activation: What the family's transformers class takes where the key is left out.
        scale_embedding: Likewise.
        **defaults: Those of `read_decoding`.

    Raises:
        ValueError: A key is missing, malformed or contradicts another.
    """
    reader.require("is_encoder_decoder", True, "the model has an encoder")
    for key, value in fixed.items():
        reader.require(key, value, f"{name} is made so; other values describe another architecture")
    size, vocab_size = reader.integer("d_model"), reader.integer("vocab_size")
    layers = {side: reader.integer(f"{side}_layers") for side in ("encoder", "decoder")}
    heads = {side: reader.integer(f"{side}_attention_heads") for side in ("encoder", "decoder")}
    dims = {side: shared_head_dim(reader, size, heads[side], f"{side}_attention_heads") for side in heads}
    reader.require("num_hidden_layers", layers["encoder"], "it is another word for encoder_layers")
    decoding = read_decoding(reader, **defaults)
    if reader.flag("force_bos_token_to_be_generated", default=False):
        reader.require("forced_bos_token_id", decoding["bos_token_id"], "force_bos_token_to_be_generated")
        decoding["forced_bos_token_id"] = decoding["bos_token_id"]
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
        "hidden_act": reader.text("activation_function", default=activation),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=True),
        "encoder_layers": layers["encoder"],
        "encoder_attention_heads": heads["encoder"],
        "encoder_head_dim": dims["encoder"],
        "encoder_ffn_dim": reader.integer("encoder_ffn_dim"),
        "scale_embedding": reader.flag("scale_embedding", default=scale_embedding),
    }


def embedding_tables(config: BartConfig, precision: Precision) -> tuple[Embedding, Embedding]:
    """The source's and the target's table: one where the head is tied to it, two where nothing is tied."""
    table = Embedding(config.vocab_size, config.hidden_size, precision.compute)
    if config.tie_word_embeddings:
        return table, table
    return Embedding(config.vocab_size, config.hidden_size, precision.compute), table


class BartPrelude(Prelude):
    """Token embedding plus a row of the table of positions, normed."""

    def __init__(
        self, config: BartConfig, embed_tokens: Embedding, shared: Shared, precision: Precision
    ) -> None:
        super().__init__(embed_tokens, [shared], precision.residual, config.embedding_scale)
        rows = config.max_position_embeddings + POSITION_OFFSET
        self.embed_positions = Embedding(rows, config.hidden_size, precision.compute)
        self.embed_norm = LayerNorm(config.hidden_size, LAYER_NORM_EPS, precision.residual)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Prelude.embed`."""
        rows = self.embed_positions(positions + POSITION_OFFSET)
        result: Tensor = self.embed_norm(super().embed(input_ids, positions) + rows.to(self.residual))
        return result


def learned_preludes(config: BartConfig, precision: Precision) -> tuple[BartPrelude, BartPrelude]:
    """The source's and the target's."""
    source_table, table = embedding_tables(config, precision)
    return (
        BartPrelude(config, source_table, SourceMask(), precision),
        BartPrelude(config, table, CausalMask(), precision),
    )


class BiasedHead(Head):
    """A head whose logits get a bias."""

    def __init__(self, norm: nn.Module, lm_head: Linear | None, embed_tokens: Embedding) -> None:
        """See `Head`."""
        super().__init__(norm, lm_head, embed_tokens)
        rows = embed_tokens.weight.shape[0]
        # The checkpoint's shape.
        self.final_logits_bias = nn.Parameter(torch.empty(1, rows, dtype=torch.float32))

    def forward(self, hidden_states: Tensor, logit_positions: Tensor | None = None) -> Tensor:
        """See `Head`."""
        return super().forward(hidden_states, logit_positions) + self.final_logits_bias


def build_bart(
    config: BartConfig, precision: Precision, source_prelude: Prelude, prelude: Prelude
) -> EncoderDecoder:
    """The module around the two preludes, with norms behind each sum."""
    head = BiasedHead(Cast(precision.compute), _own_head(config, precision), prelude.embed_tokens)
    return layer_norm_encoder_decoder(
        config, precision, source_prelude, prelude, head, epsilon=LAYER_NORM_EPS, attention_bias=True
    )


def build_pre_norm_bart(
    config: BartConfig,
    precision: Precision,
    source_prelude: Prelude,
    prelude: Prelude,
    *,
    logits_bias: bool = True,
) -> EncoderDecoder:
    """The module around the two preludes, with a norm before each part and one behind the last layer of either side."""
    norm = LayerNorm(config.hidden_size, LAYER_NORM_EPS, precision.compute)
    kind = BiasedHead if logits_bias else Head
    return layer_norm_encoder_decoder(
        config,
        precision,
        source_prelude,
        prelude,
        kind(norm, _own_head(config, precision), prelude.embed_tokens),
        epsilon=LAYER_NORM_EPS,
        attention_bias=True,
        pre_norm=True,
    )


def _own_head(config: BartConfig, precision: Precision) -> Linear | None:
    tied = config.tie_word_embeddings
    return None if tied else Linear(config.hidden_size, config.vocab_size, False, precision.compute)


def table_names(config: BartConfig) -> dict[str, Into]:
    """The checkpoint's names of `embedding_tables`; where nothing is tied, nothing reads the shared one."""
    tied = config.tie_word_embeddings
    return {
        "model.shared.weight": EMBEDDING if tied else None,
        "model.encoder.embed_tokens.weight": EMBEDDING if tied else "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight": EMBEDDING,
    }


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
