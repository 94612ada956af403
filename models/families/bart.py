"""BART: learned positions, a norm behind the embedding and behind each sum, biases, a tied head with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvgraph.models.bart_encoder_decoder import (
    EMBEDDING,
    LAYER_NORM_EPS,
    BartConfig,
    bart_names,
    build_bart,
    read_bart,
)
from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.cross_attention import SourceMask
from kvgraph.models.decoder import Prelude
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm_decoder import renamed
from kvgraph.models.layers import Embedding, Precision
from kvgraph.models.positions import CausalMask, Shared
from kvgraph.models.post_norm_encoder_decoder import stream_norm

# The table of positions begins with two rows that no position reads.
POSITION_OFFSET = 2
# How old files spell what this architecture is; with other values they describe another one.
FIXED = {
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
    "extra_pos_embeddings": POSITION_OFFSET,
}


def config_from_hf(hf: Mapping[str, Any]) -> BartConfig:
    """Read a `bart` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf)
    fields = read_bart(reader, bos_token_id=0, eos_token_ids=(2,), forced_eos_token_id=2)
    if fields["decoder_start_token_id"] is None and "decoder_start_token_id" not in hf:
        fields["decoder_start_token_id"] = 2
    config = BartConfig(**fields)
    for key, value in FIXED.items():
        reader.require(key, value, "BART is made so; other values describe another architecture")
    reader.refuse_unread(config.model_type)
    return config


class BartPrelude(Prelude):
    """Token embedding plus a row of the table of positions, normed."""

    def __init__(
        self, config: BartConfig, embed_tokens: Embedding, shared: Shared, precision: Precision
    ) -> None:
        super().__init__(embed_tokens, [shared], precision.residual, config.embedding_scale)
        rows = config.max_position_embeddings + POSITION_OFFSET
        self.embed_positions = Embedding(rows, config.hidden_size, precision.compute)
        self.embed_norm = stream_norm(config.hidden_size, LAYER_NORM_EPS, precision)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Prelude.embed`."""
        rows = self.embed_positions(positions + POSITION_OFFSET)
        result: Tensor = self.embed_norm(super().embed(input_ids, positions) + rows.to(self.residual))
        return result


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, BartConfig)
    table = Embedding(config.vocab_size, config.hidden_size, precision.compute)
    source = BartPrelude(config, table, SourceMask(), precision)
    return build_bart(config, precision, source, BartPrelude(config, table, CausalMask(), precision))


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The decoder's names are shorter in graphs, the encoder's are the same."""
    norm = {"layernorm_embedding": "embed_norm"}
    return {
        "model.shared.weight": EMBEDDING,
        "model.encoder.embed_tokens.weight": EMBEDDING,
        "model.decoder.embed_tokens.weight": EMBEDDING,
        "model.encoder.embed_positions.weight": "model.encoder.embed_positions.weight",
        "model.decoder.embed_positions.weight": "model.embed_positions.weight",
        **renamed(norm, "model.encoder.", "model.encoder."),
        **renamed(norm, "model.decoder.", "model."),
        **bart_names(),
        # Version numbers of old files.
        "model.encoder.version": None,
        "model.decoder.version": None,
    }


FAMILY = Family("bart", config_from_hf, build, weight_names, base_prefix="model.")
