"""mBART: BART's embeddings, with a norm before each part of a layer and one behind the last layer of either side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgraph.models.bart_encoder_decoder import (
    LEARNED_POSITIONS,
    POSITION_OFFSET,
    BartConfig,
    BartPrelude,
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

# How old files spell what this architecture is; with other values they describe another one.
FIXED = {
    "normalize_before": True,
    "normalize_embedding": True,
    "add_final_layer_norm": True,
    "static_position_embeddings": False,
    "extra_pos_embeddings": POSITION_OFFSET,
}


def config_from_hf(hf: Mapping[str, Any]) -> BartConfig:
    """Read an `mbart` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf)
    config = BartConfig(**read_bart(reader, bos_token_id=0, eos_token_ids=(2,), forced_eos_token_id=2))
    for key, value in FIXED.items():
        reader.require(key, value, "mBART is made so; other values describe another architecture")
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, BartConfig)
    source_table, table = embedding_tables(config, precision)
    source = BartPrelude(config, source_table, SourceMask(), precision)
    return build_pre_norm_bart(config, precision, source, BartPrelude(config, table, CausalMask(), precision))


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The decoder's names are shorter in graphs, the encoder's are the same."""
    assert isinstance(config, BartConfig)
    norms = {"layernorm_embedding": "embed_norm", "layer_norm": "norm"}
    return {
        **table_names(config),
        **LEARNED_POSITIONS,
        **renamed(norms, "model.encoder.", "model.encoder."),
        **renamed(norms, "model.decoder.", "model."),
        **bart_names(),
    }


FAMILY = Family("mbart", config_from_hf, build, weight_names, base_prefix="model.")
