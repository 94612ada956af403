"""An encoder and a decoder with layer norms: behind each sum, as the first Transformer has them, or before."""

from __future__ import annotations

from kvgraph.models.cross_attention import CrossAttention, CrossProjection, SourceAttention
from kvgraph.models.decoder import Head, Prelude
from kvgraph.models.encoder_decoder import Encoder, EncoderDecoder
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig
from kvgraph.models.encoder_decoder_layers import (
    PostNormCrossLayer,
    PostNormEncoderLayer,
    PreNormCrossLayer,
    PreNormEncoderLayer,
)
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layers import MLP, Attention, Cast, Precision


def layer_norm_encoder_decoder(
    config: EncoderDecoderConfig,
    precision: Precision,
    source_prelude: Prelude,
    prelude: Prelude,
    head: Head,
    *,
    epsilon: float,
    attention_bias: bool,
    pre_norm: bool = False,
) -> EncoderDecoder:
    """The module with unset parameters.

    Where norms come behind each sum, nothing but a cast follows the encoder's last layer; where they come before each
    part, one more norm does.

    Args:
        config: Sizes.
        precision: Element types.
        source_prelude: Embeds a source.
        prelude: Embeds the decoder's tokens.
        head: The piece after the decoder's layers.
        epsilon: Of every layer norm in the layers.
        attention_bias: Whether attention's projections have biases; those of the feed-forward part have.
        pre_norm: Whether norms come before each part.
    """
    size, dim, compute = config.hidden_size, config.head_dim, precision.compute
    layers = range(config.num_hidden_layers)
    encoder_layers = [
        encoder_layer(config, precision, epsilon, attention_bias, pre_norm)
        for _ in range(config.encoder_layers)
    ]
    cross = [
        CrossProjection(size, config.num_attention_heads, dim, compute, bias=attention_bias) for _ in layers
    ]
    return EncoderDecoder(
        config,
        precision,
        Encoder(
            source_prelude, encoder_layers, LayerNorm(size, epsilon, compute) if pre_norm else Cast(compute)
        ),
        prelude,
        [decoder_layer(config, precision, epsilon, attention_bias, pre_norm) for _ in layers],
        cross,
        head,
    )


def encoder_layer(
    config: EncoderDecoderConfig, precision: Precision, epsilon: float, bias: bool, pre_norm: bool
) -> PostNormEncoderLayer | PreNormEncoderLayer:
    """A layer of the encoder."""
    size, heads, dim = config.hidden_size, config.encoder_attention_heads, config.encoder_head_dim
    kind = PreNormEncoderLayer if pre_norm else PostNormEncoderLayer
    return kind(
        SourceAttention(size, heads, dim, precision, bias=bias, scale=dim**-0.5),
        layer_norm(size, epsilon, precision, pre_norm),
        MLP(size, config.encoder_ffn_dim, config.hidden_act, True, precision),
        layer_norm(size, epsilon, precision, pre_norm),
    )


def decoder_layer(
    config: EncoderDecoderConfig, precision: Precision, epsilon: float, bias: bool, pre_norm: bool
) -> PostNormCrossLayer | PreNormCrossLayer:
    """A layer of the decoder."""
    size, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
    kind = PreNormCrossLayer if pre_norm else PostNormCrossLayer
    return kind(
        Attention(config, precision, qkv_bias=bias, out_bias=bias),
        layer_norm(size, epsilon, precision, pre_norm),
        CrossAttention(size, heads, dim, precision, bias=bias, scale=dim**-0.5),
        layer_norm(size, epsilon, precision, pre_norm),
        MLP(size, config.intermediate_size, config.hidden_act, True, precision),
        layer_norm(size, epsilon, precision, pre_norm),
    )


def layer_norm(size: int, epsilon: float, precision: Precision, pre_norm: bool) -> LayerNorm:
    """A norm of a layer; what comes behind a sum gives the stream itself."""
    return LayerNorm(size, epsilon, precision.compute if pre_norm else precision.residual)
