"""Pegasus: Marian's positions, with a norm before each part of a layer and one behind the last layer of either side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgraph.models.bart_encoder_decoder import (
    BartConfig,
    bart_names,
    build_pre_norm_bart,
    embedding_tables,
    read_bart,
    table_names,
)
from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.cross_attention import SourceMask
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm_decoder import renamed
from kvgraph.models.layers import Precision
from kvgraph.models.positions import CausalMask
from kvgraph.models.sinusoidal_positions import HalvesPrelude

# How old files spell what this architecture is; with other values they describe another one.
FIXED = {
    "normalize_before": True,
    "normalize_embedding": False,
    "add_final_layer_norm": True,
    "static_position_embeddings": True,
}
FINAL_NORM = {"layer_norm": "norm"}


def config_from_hf(hf: Mapping[str, Any]) -> BartConfig:
    """Read a `pegasus` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf)
    fields = read_bart(
        reader, "Pegasus", FIXED, eos_token_ids=(1,), decoder_start_token_id=0, forced_eos_token_id=1
    )
    if fields["hidden_size"] % 2:
        raise reader.error(f"d_model is {fields['hidden_size']}, expected an even number for its positions")
    config = BartConfig(**fields)
    # Nothing is left free in front of computed positions.
    reader.ignore("extra_pos_embeddings")
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, BartConfig)
    source_table, table = embedding_tables(config, precision)
    residual, scale = precision.residual, config.embedding_scale
    source = HalvesPrelude(source_table, [SourceMask()], residual, scale)
    return build_pre_norm_bart(
        config, precision, source, HalvesPrelude(table, [CausalMask()], residual, scale)
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The decoder's names are shorter in graphs, the encoder's are the same."""
    assert isinstance(config, BartConfig)
    return {
        **table_names(config),
        # Sines and cosines.
        "model.encoder.embed_positions.weight": None,
        "model.decoder.embed_positions.weight": None,
        **renamed(FINAL_NORM, "model.encoder.", "model.encoder."),
        **renamed(FINAL_NORM, "model.decoder.", "model."),
        **bart_names(),
    }


FAMILY = Family("pegasus", config_from_hf, build, weight_names, base_prefix="model.")
