"""Marian, the translators of OPUS-MT: BART's layers, sines and cosines of the position, one vocabulary or two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.bart_encoder_decoder import EMBEDDING, BartConfig, bart_names, build_bart, read_bart
from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.cross_attention import SourceMask
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layers import Embedding, Precision
from kvgraph.models.positions import CausalMask
from kvgraph.models.sinusoidal_positions import HalvesPrelude

# How old files spell what this architecture is; with other values they describe another one.
FIXED = {
    "normalize_before": False,
    "normalize_embedding": False,
    "add_final_layer_norm": False,
    "static_position_embeddings": True,
    "extra_pos_embeddings": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MarianConfig(BartConfig):
    """Marian's configuration.

    Attributes:
        share_encoder_decoder_embeddings: Whether both sides have one vocabulary and one table.
    """

    share_encoder_decoder_embeddings: bool


def config_from_hf(hf: Mapping[str, Any]) -> MarianConfig:
    """Read a `marian` config.json; defaults as in `llama.config_from_hf`.

    What a library would take for absent tokens fits one model only, so these are read from the file alone.
    """
    reader = ConfigReader(hf)
    reader.require(
        "tie_word_embeddings",
        True,
        "libraries differ in which of the other tables are one where the head is not",
    )
    fields = read_bart(reader, "Marian", FIXED)
    shared = reader.flag("share_encoder_decoder_embeddings", default=True)
    target = reader.integer("decoder_vocab_size", default=fields["vocab_size"])
    if shared and target != fields["vocab_size"]:
        raise reader.error(
            f"decoder_vocab_size is {target} and vocab_size {fields['vocab_size']}, which cannot be one table; "
            "share_encoder_decoder_embeddings says they are"
        )
    if fields["hidden_size"] % 2:
        raise reader.error(f"d_model is {fields['hidden_size']}, expected an even number for its positions")
    config = MarianConfig(**{**fields, "vocab_size": target}, share_encoder_decoder_embeddings=shared)
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, MarianConfig)
    table = Embedding(config.vocab_size, config.hidden_size, precision.compute)
    source_table = table
    if not config.share_encoder_decoder_embeddings:
        source_table = Embedding(config.source_vocab_size, config.hidden_size, precision.compute)
    residual, scale = precision.residual, config.embedding_scale
    source = HalvesPrelude(source_table, [SourceMask()], residual, scale)
    return build_bart(config, precision, source, HalvesPrelude(table, [CausalMask()], residual, scale))


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The decoder's names are shorter in graphs, the encoder's are the same."""
    assert isinstance(config, MarianConfig)
    shared = config.share_encoder_decoder_embeddings
    tables: dict[str, Into] = {"model.shared.weight": EMBEDDING} if shared else {}
    return {
        **tables,
        "model.encoder.embed_tokens.weight": EMBEDDING if shared else "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight": EMBEDDING,
        # The same sines and cosines.
        "model.encoder.embed_positions.weight": None,
        "model.decoder.embed_positions.weight": None,
        **bart_names(),
    }


FAMILY = Family("marian", config_from_hf, build, weight_names, base_prefix="model.")
