"""T5, its version 1.1 and Flan-T5: relative position biases, RMS norms, no biases, scores that are not scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.cross_attention import CrossAttention, CrossProjection, SourceAttention
from kvgraph.models.decoder import Head, Prelude
from kvgraph.models.encoder_decoder import Encoder, EncoderDecoder
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig, read_decoding
from kvgraph.models.encoder_decoder_layers import PreNormCrossLayer, PreNormEncoderLayer
from kvgraph.models.family import Family, Into
from kvgraph.models.layers import MLP, Attention, Embedding, GatedMLP, Linear, Precision, RMSNorm
from kvgraph.models.relative_bias import RelativeBias

# There is no table of positions to run out of, but buffers need a bound; `n_positions` is what it was trained on.
MAX_POSITIONS = 4096
# A training recipe's business, and the form of old files.
WITHOUT_EFFECT = ("dropout_rate", "initializer_factor", "output_past", "n_positions")
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(EncoderDecoderConfig):
    """T5's configuration.

    Attributes:
        layer_norm_epsilon: Epsilon of every norm.
        relative_attention_num_buckets: Biases of a head.
        relative_attention_max_distance: Distance from which on all share one.
        is_gated_act: Whether the feed-forward part is gated.
        scale_decoder_outputs: Whether logits are divided by sqrt(E).
    """

    layer_norm_epsilon: float
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    is_gated_act: bool
    scale_decoder_outputs: bool


def config_from_hf(hf: Mapping[str, Any]) -> T5Config:
    """Read a `t5` config.json; defaults as in `llama.config_from_hf`.

    A head of its own goes with logits that are not scaled, as in version 1.1; recent libraries write the second alone.
    """
    reader = ConfigReader(hf)
    reader.require("is_encoder_decoder", True, "T5 has an encoder")
    heads, layers = reader.integer("num_heads"), reader.integer("num_layers")
    head_dim, inner = reader.integer("d_kv"), reader.integer("d_ff")
    hidden_act, gated = read_feed_forward(reader)
    tied = reader.flag("tie_word_embeddings", default=True)
    scaled = reader.flag("scale_decoder_outputs", default=tied)
    vocab_size = reader.integer("vocab_size")
    config = T5Config(
        **read_decoding(reader, eos_token_ids=(1,)),
        model_type=reader.text("model_type"),
        vocab_size=vocab_size,
        source_vocab_size=vocab_size,
        hidden_size=reader.integer("d_model"),
        intermediate_size=inner,
        num_hidden_layers=reader.integer("num_decoder_layers", default=layers),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        hidden_act=hidden_act,
        tie_word_embeddings=tied and scaled,
        encoder_layers=layers,
        encoder_attention_heads=heads,
        encoder_head_dim=head_dim,
        encoder_ffn_dim=inner,
        layer_norm_epsilon=reader.number("layer_norm_epsilon"),
        relative_attention_num_buckets=reader.integer("relative_attention_num_buckets", minimum=4),
        relative_attention_max_distance=reader.integer("relative_attention_max_distance", default=128),
        is_gated_act=gated,
        scale_decoder_outputs=scaled,
    )
    if config.relative_attention_max_distance * 2 <= config.relative_attention_num_buckets:
        raise reader.error(
            f"relative_attention_max_distance is {config.relative_attention_max_distance}, expected more than half of "
            f"the {config.relative_attention_num_buckets} buckets, which are for single distances"
        )
    reader.ignore(*WITHOUT_EFFECT)
    reader.refuse_unread(config.model_type)
    return config


def read_feed_forward(reader: ConfigReader) -> tuple[str, bool]:
    """Activation and whether it is gated, from `feed_forward_proj`: "relu", "gated-gelu"."""
    text = reader.text("feed_forward_proj", default="relu")
    parts = text.split("-")
    if len(parts) > 2 or (len(parts) == 2 and parts[0] != "gated"):
        raise reader.error(f"feed_forward_proj is {text!r}, expected an activation or gated-ACTIVATION")
    # What the name has meant from the start.
    act = "gelu_new" if text == "gated-gelu" else parts[-1]
    gated = len(parts) == 2
    reader.require("dense_act_fn", act, f"feed_forward_proj is {text!r}")
    reader.require("is_gated_act", gated, f"feed_forward_proj is {text!r}")
    return act, gated


class T5Prelude(Prelude):
    """Token embedding, and the bias that all layers add to their scores."""

    def __init__(self, embed_tokens: Embedding, bias: RelativeBias, residual: torch.dtype) -> None:
        super().__init__(embed_tokens, [bias], residual)
        self.relative_attention_bias = bias


def prelude(
    config: T5Config, embed_tokens: Embedding, precision: Precision, *, bidirectional: bool
) -> T5Prelude:
    """The prelude of the encoder or of the decoder."""
    bias = RelativeBias(
        config.num_attention_heads,
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
        bidirectional,
        precision.compute,
    )
    return T5Prelude(embed_tokens, bias, precision.residual)


def norm(config: T5Config, precision: Precision) -> RMSNorm:
    """Any of its norms."""
    return RMSNorm(config.hidden_size, config.layer_norm_epsilon, precision.compute)


def mlp(config: T5Config, precision: Precision) -> nn.Module:
    """The feed-forward part of a layer."""
    kind = GatedMLP if config.is_gated_act else MLP
    return kind(config.hidden_size, config.intermediate_size, config.hidden_act, False, precision)


def encoder(config: T5Config, embed_tokens: Embedding, precision: Precision) -> Encoder:
    """The encoder."""
    size, heads, dim = config.hidden_size, config.encoder_attention_heads, config.encoder_head_dim
    layers = [
        PreNormEncoderLayer(
            SourceAttention(size, heads, dim, precision, bias=False, scale=1.0),
            norm(config, precision),
            mlp(config, precision),
            norm(config, precision),
        )
        for _ in range(config.encoder_layers)
    ]
    first = prelude(config, embed_tokens, precision, bidirectional=True)
    return Encoder(first, layers, norm(config, precision))


def decoder_layer(config: T5Config, precision: Precision) -> PreNormCrossLayer:
    """A layer of the decoder."""
    size, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    return PreNormCrossLayer(
        Attention(config, precision, qkv_bias=False, out_bias=False, scale=1.0),
        norm(config, precision),
        CrossAttention(size, heads, dim, precision, bias=False, scale=1.0),
        norm(config, precision),
        mlp(config, precision),
        norm(config, precision),
    )


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, T5Config)
    size, compute = config.hidden_size, precision.compute
    embed_tokens = Embedding(config.vocab_size, size, compute)
    lm_head = None if config.tie_word_embeddings else Linear(size, config.vocab_size, False, compute)
    scale = size**-0.5 if config.scale_decoder_outputs else 1.0
    layers = range(config.num_hidden_layers)
    return EncoderDecoder(
        config,
        precision,
        encoder(config, embed_tokens, precision),
        prelude(config, embed_tokens, precision, bidirectional=False),
        [decoder_layer(config, precision) for _ in layers],
        [
            CrossProjection(size, config.num_attention_heads, config.head_dim, compute, bias=False)
            for _ in layers
        ],
        Head(norm(config, precision), lm_head, embed_tokens, scale),
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """T5 numbers the parts of a block, and keeps the biases of all layers in the first one."""
    assert isinstance(config, T5Config)
    ffn = {"wi_0": "gate", "wi_1": "up", "wo": "down"} if config.is_gated_act else {"wi": "up", "wo": "down"}
    table = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    names: dict[str, Into] = {
        "shared.weight": EMBEDDING,
        "encoder.embed_tokens.weight": EMBEDDING,
        "decoder.embed_tokens.weight": EMBEDDING,
        "lm_head.weight": "lm_head.weight",
        f"encoder.{table}": "model.encoder.relative_attention_bias.weight",
        f"decoder.{table}": "model.relative_attention_bias.weight",
        # Of old files: attention to a source has no positions.
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": None,
        "encoder.final_layer_norm.weight": "model.encoder.norm.weight",
        "decoder.final_layer_norm.weight": "model.norm.weight",
    }
    parts = ("self_attn", "mlp"), ("self_attn", "cross_attn", "mlp")
    blocks = ("encoder.block.{j}.", "model.encoder.layers.{j}."), ("decoder.block.{i}.", "model.layers.{i}.")
    for (theirs, ours), modules in zip(blocks, parts, strict=True):
        for number, module in enumerate(modules):
            attention = "EncDecAttention" if module == "cross_attn" else "SelfAttention"
            inner = ffn if module == "mlp" else {letter: letter for letter in "qkvo"}
            source = "DenseReluDense" if module == "mlp" else attention
            names[f"{theirs}layer.{number}.layer_norm.weight"] = f"{ours}{module}_norm.weight"
            for name, projection in inner.items():
                weight = f"{theirs}layer.{number}.{source}.{name}.weight"
                names[weight] = f"{ours}{module}.{projection}_proj.weight"
    return names


FAMILY = Family("t5", config_from_hf, build, weight_names)
