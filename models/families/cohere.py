"""Cohere's Command and Aya: parallel branches behind one norm, interleaved rotary pairs, scaled logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, Head, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layers import Attention, Embedding, GatedMLP, Linear, Precision
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.residual_layers import ParallelLayer
from kvgraph.models.rms_decoder import GATED_MLP, QKVO, same_names
from kvgraph.models.rope import RopeConfig, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(ModelConfig):
    """Cohere's configuration.

    Attributes:
        layer_norm_eps: Epsilon of every layer norm.
        attention_bias: Whether the q, k, v and o projections have biases.
        logit_scale: Factor on the logits.
        rope: The rotary embedding.
    """

    layer_norm_eps: float
    attention_bias: bool
    logit_scale: float
    rope: RopeConfig

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        return self.rope.stretched(self.max_position_embeddings)


def config_from_hf(hf: Mapping[str, Any]) -> CohereConfig:
    """Read a `cohere` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    # Published files leave out that the head is tied.
    common = read_common(reader, tie_word_embeddings=True)
    config = CohereConfig(
        **common,
        layer_norm_eps=reader.number("layer_norm_eps"),
        attention_bias=reader.flag("attention_bias", default=False),
        logit_scale=reader.number("logit_scale"),
        rope=read_rope(reader, common["head_dim"]),
    )
    reader.require("use_qk_norm", False, "norms with a weight for each head are not implemented")
    # The length that was tried, and not the one that the rotary embedding was made for; the class ignores it.
    reader.ignore("model_max_length")
    reader.refuse_unread(config.model_type)
    return config


def layer(config: CohereConfig, precision: Precision) -> ParallelLayer:
    """A layer whose two branches read the same norm."""
    compute, size, bias = precision.compute, config.hidden_size, config.attention_bias
    return ParallelLayer(
        LayerNorm(size, config.layer_norm_eps, compute, bias=False),
        Attention(config, precision, qkv_bias=bias, out_bias=bias, interleaved=True),
        None,
        GatedMLP(size, config.intermediate_size, config.hidden_act, False, precision),
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, CohereConfig)
    compute, size = precision.compute, config.hidden_size
    embed_tokens = Embedding(config.vocab_size, size, compute)
    lm_head = None if config.tie_word_embeddings else Linear(size, config.vocab_size, False, compute)
    norm = LayerNorm(size, config.layer_norm_eps, compute, bias=False)
    return Decoder(
        config,
        precision,
        Prelude(
            embed_tokens,
            [CausalMask(), Rotary(config.rope, config.head_dim, compute)],
            precision.residual,
        ),
        [layer(config, precision) for _ in range(config.num_hidden_layers)],
        Head(norm, lm_head, embed_tokens, config.logit_scale),
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own."""
    return same_names(["input_layernorm", *QKVO, *GATED_MLP])


FAMILY = Family("cohere", config_from_hf, build, weight_names)
