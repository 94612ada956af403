"""The original Transformer of 2017: N + N layers, norms behind each sum, ReLU, sines and cosines of the position.

For people who wrote their own. The checkpoint is a directory with model.safetensors and this config.json:

    {
      "model_type": "post_norm_encoder_decoder",
      "source_vocab_size": 8000, "vocab_size": 8000,
      "hidden_size": 512, "intermediate_size": 2048,
      "encoder_layers": 6, "decoder_layers": 6, "num_attention_heads": 8,
      "max_position_embeddings": 1024,
      "layer_norm_eps": 1e-5,
      "attention_bias": true,
      "share_embeddings": true, "tie_word_embeddings": true,
      "decoder_start_token_id": 1, "eos_token_id": 2
    }

| key | meaning |
|---|---|
| `vocab_size`, `source_vocab_size` | of the target and of the source; equal where they share a table |
| `attention_bias` | whether the projections of attention have biases |
| `share_embeddings` | whether source and target are looked up in one table |
| `tie_word_embeddings` | whether the head is the target's table |
| `head_bias` | whether there is a `head.bias` (false); not with a tied head |
| `hidden_act` | "relu" unless it says otherwise: "gelu", "gelu_pytorch_tanh", "silu" |
| `scale_embeddings` | whether embeddings are multiplied by sqrt(E) (true) |

`head_dim` is `hidden_size` / `num_attention_heads` unless it is given; `bos_token_id`, `forced_bos_token_id`,
`forced_eos_token_id` and `dtype` are read as for BART. Dimension 2i of a position is sin(position / 10000 ** (2i / E)),
2i + 1 its cosine.

| tensor | shape |
|---|---|
| `embed.weight`, where both sides share it | [V, E] |
| `source_embed.weight`, `target_embed.weight`, where they do not | [V, E] |
| `encoder.{i}.attn`, `decoder.{i}.self_attn`, `decoder.{i}.cross_attn` | of four matrices: |
| their `.wq`, `.wk`, `.wv`: `.weight`, `.bias` | [H * D, E], [H * D] |
| their `.wo`: `.weight`, `.bias` | [E, H * D], [E] |
| `encoder.{i}.ffn`, `decoder.{i}.ffn`: `.w1`: `.weight`, `.bias` | [F, E], [F] |
| `encoder.{i}.ffn`, `decoder.{i}.ffn`: `.w2`: `.weight`, `.bias` | [E, F], [E] |
| `encoder.{i}`: `.norm1`, `.norm2`; `decoder.{i}`: `.norm1`, `.norm2`, `.norm3`: `.weight`, `.bias` | [E], [E] |
| `head.weight`, unless tied; `head.bias` | [V, E], [V] |

An encoder layer is x = norm1(x + attn(x)), x = norm2(x + ffn(x)); a decoder layer x = norm1(x + self_attn(x)),
x = norm2(x + cross_attn(x, source)), x = norm3(x + ffn(x)), with ffn(x) = w2 act(w1 x + b1) + b2. Nothing follows the
last layers: the decoder reads what leaves the encoder, the head what leaves the decoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_head_dim
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.cross_attention import SourceMask
from kvgraph.models.decoder import Head
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig, read_decoding
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm_decoder import renamed
from kvgraph.models.layer_norm_encoder_decoder import layer_norm_encoder_decoder
from kvgraph.models.layers import Cast, Embedding, Linear, Precision
from kvgraph.models.positions import CausalMask
from kvgraph.models.sinusoidal_positions import SinusoidalPrelude

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig(EncoderDecoderConfig):
    """The configuration of the module docstring.

    Attributes:
        layer_norm_eps: Epsilon of every layer norm.
        attention_bias: Whether the projections of attention have biases.
        share_embeddings: Whether both sides have one table.
        scale_embeddings: Whether embeddings are multiplied by sqrt(E).
        head_bias: Whether the head has a bias.
    """

    layer_norm_eps: float
    attention_bias: bool
    share_embeddings: bool
    scale_embeddings: bool
    head_bias: bool


def config_from_hf(hf: Mapping[str, Any]) -> TransformerConfig:
    """Read the config.json of the module docstring.

    Raises:
        ValueError: A key is missing, malformed or unknown, or two contradict each other.
    """
    reader = ConfigReader(hf)
    size, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim, inner = read_head_dim(reader), reader.integer("intermediate_size")
    config = TransformerConfig(
        **read_decoding(reader),
        model_type=reader.text("model_type"),
        vocab_size=reader.integer("vocab_size"),
        source_vocab_size=reader.integer("source_vocab_size"),
        hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=reader.integer("decoder_layers"),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        max_position_embeddings=reader.integer("max_position_embeddings"),
        hidden_act=reader.text("hidden_act", default="relu"),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        encoder_layers=reader.integer("encoder_layers"),
        encoder_attention_heads=heads,
        encoder_head_dim=head_dim,
        encoder_ffn_dim=inner,
        layer_norm_eps=reader.number("layer_norm_eps"),
        attention_bias=reader.flag("attention_bias"),
        share_embeddings=reader.flag("share_embeddings"),
        scale_embeddings=reader.flag("scale_embeddings", default=True),
        head_bias=reader.flag("head_bias", default=False),
    )
    reader.require("is_encoder_decoder", True, "the model has an encoder")
    if size % 2:
        raise reader.error(f"hidden_size is {size}, expected an even number for its positions")
    if config.share_embeddings and config.source_vocab_size != config.vocab_size:
        raise reader.error(
            f"source_vocab_size is {config.source_vocab_size} and vocab_size {config.vocab_size}, which cannot be one "
            "table; share_embeddings says they are"
        )
    if config.head_bias and config.tie_word_embeddings:
        raise reader.error("head_bias and tie_word_embeddings are both true, which is not implemented")
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, TransformerConfig)
    size, compute = config.hidden_size, precision.compute
    table = Embedding(config.vocab_size, size, compute)
    source_table = table if config.share_embeddings else Embedding(config.source_vocab_size, size, compute)
    scale = math.sqrt(size) if config.scale_embeddings else 1.0
    lm_head = (
        None if config.tie_word_embeddings else Linear(size, config.vocab_size, config.head_bias, compute)
    )
    return layer_norm_encoder_decoder(
        config,
        precision,
        SinusoidalPrelude(source_table, [SourceMask()], precision.residual, scale),
        SinusoidalPrelude(table, [CausalMask()], precision.residual, scale),
        Head(Cast(compute), lm_head, table),
        epsilon=config.layer_norm_eps,
        attention_bias=config.attention_bias,
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The names of the module docstring."""
    assert isinstance(config, TransformerConfig)
    tables: dict[str, Into] = {"embed.weight": EMBEDDING}
    if not config.share_embeddings:
        tables = {
            "source_embed.weight": "model.encoder.embed_tokens.weight",
            "target_embed.weight": EMBEDDING,
        }
    return {
        **tables,
        **renamed({"head": "lm_head"}),
        # The encoder's layers have a number of their own.
        **renamed(_modules({"attn": "self_attn"}), "encoder.{j}.", "model.encoder.layers.{j}."),
        **renamed(
            _modules({"self_attn": "self_attn", "cross_attn": "cross_attn"}),
            "decoder.{i}.",
            "model.layers.{i}.",
        ),
    }


def _modules(attentions: Mapping[str, str]) -> dict[str, str]:
    """The file's name of every module of a layer -> the graph's, in order: attentions, then the feed-forward part."""
    parts = [*attentions.values(), "mlp"]
    return {
        **{
            f"{theirs}.w{letter}": f"{ours}.{letter}_proj"
            for theirs, ours in attentions.items()
            for letter in "qkvo"
        },
        "ffn.w1": "mlp.up_proj",
        "ffn.w2": "mlp.down_proj",
        **{f"norm{number}": f"{part}_norm" for number, part in enumerate(parts, 1)},
    }


FAMILY = Family("post_norm_encoder_decoder", config_from_hf, build, weight_names)
