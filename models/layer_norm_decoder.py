"""What the decoders with layer norms have in common: their head, and how their weights are renamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvgraph.models.config import ModelConfig
from kvgraph.models.decoder import Decoder, DecoderLayer, Head, Prelude
from kvgraph.models.family import Into
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layers import Embedding, Linear, Precision

LAYER = "model.layers.{i}."


def token_embedding(config: ModelConfig, precision: Precision) -> Embedding:
    """The table of token embeddings as `config` sizes it."""
    return Embedding(config.vocab_size, config.hidden_size, precision.compute)


def layer_norm_decoder(
    config: ModelConfig,
    precision: Precision,
    prelude: Prelude,
    layers: Sequence[DecoderLayer],
    epsilon: float,
    *,
    norm_bias: bool = True,
    head_bias: bool = False,
) -> Decoder:
    """`prelude`, `layers`, a layer norm and a head of its own or, tied, the embedding's.

    Args:
        config: Sizes.
        precision: Element types.
        prelude: The piece before the layers.
        layers: In order.
        epsilon: Of the layer norm.
        norm_bias: Whether the layer norm has a bias.
        head_bias: Whether a head of its own has one.
    """
    compute, size = precision.compute, config.hidden_size
    norm = LayerNorm(size, epsilon, compute, norm_bias)
    lm_head = None if config.tie_word_embeddings else Linear(size, config.vocab_size, head_bias, compute)
    return Decoder(config, precision, prelude, layers, Head(norm, lm_head, prelude.embed_tokens))


def renamed(modules: Mapping[str, str], theirs: str = "", ours: str = "") -> dict[str, Into]:
    """Checkpoint name -> graph name of the weight and the bias of each module.

    Args:
        modules: The checkpoint's name of a module -> the graph's.
        theirs: What the checkpoint's names begin with.
        ours: What the graph's names begin with.
    """
    return {
        f"{theirs}{source}.{kind}": f"{ours}{module}.{kind}"
        for source, module in modules.items()
        for kind in ("weight", "bias")
    }
