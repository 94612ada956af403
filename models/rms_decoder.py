"""What decoders in the manner of Llama have in common: RMS norms, rotary positions, the same names of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, DecoderLayer, Head, Prelude
from kvgraph.models.family import Into
from kvgraph.models.layers import Embedding, GatedMLP, Linear, Precision, RMSNorm
from kvgraph.models.positions import Shared
from kvgraph.models.rope import RopeConfig

LAYER = "model.layers.{i}."
QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class RMSConfig(ModelConfig):
    """The configuration of a decoder with RMS norms and rotary positions.

    Attributes:
        rms_norm_eps: Epsilon of every RMS norm.
        rope: The rotary embedding.
    """

    rms_norm_eps: float
    rope: RopeConfig

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        return self.rope.stretched(self.max_position_embeddings)


def read_rms(reader: ConfigReader, *, tie_word_embeddings: bool = False) -> dict[str, Any]:
    """The fields of `RMSConfig` save for `rope`; arguments as in `read_common`."""
    common = read_common(reader, tie_word_embeddings=tie_word_embeddings)
    return {**common, "rms_norm_eps": reader.number("rms_norm_eps")}


def gated_mlp(config: ModelConfig, precision: Precision, bias: bool = False) -> GatedMLP:
    """The feed-forward part as `config` sizes it."""
    return GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias, precision)


def rms_decoder(
    config: RMSConfig,
    precision: Precision,
    shared: Sequence[Shared],
    layers: Sequence[DecoderLayer],
    *,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> Decoder:
    """Embedding, `layers`, an RMS norm and a head of its own or, tied, the embedding's.

    Args:
        config: Sizes.
        precision: Element types.
        shared: What layers share.
        layers: In order.
        embedding_scale: See `Prelude`.
        logit_scale: See `Head`.
        logit_softcap: See `Head`.
    """
    compute = precision.compute
    embed_tokens = Embedding(config.vocab_size, config.hidden_size, compute)
    tied = config.tie_word_embeddings
    lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, False, compute)
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps, compute)
    return Decoder(
        config,
        precision,
        Prelude(embed_tokens, shared, precision.residual, embedding_scale),
        layers,
        Head(norm, lm_head, embed_tokens, logit_scale, logit_softcap),
    )


def same_names(modules: Iterable[str]) -> dict[str, Into]:
    """Names of a checkpoint whose tensors are called as the graphs call them.

    Args:
        modules: Of a layer; each may have a weight and a bias.
    """
    outer = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    inner = (f"{LAYER}{module}.{kind}" for module in modules for kind in ("weight", "bias"))
    return {name: name for name in (*outer, *inner)}
