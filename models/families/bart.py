"""BART: learned positions, a norm behind the embedding and behind each sum, biases, a tied head with a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgraph.models.bart_encoder_decoder import (
    LEARNED_POSITIONS,
    POSITION_OFFSET,
    BartConfig,
    bart_names,
    build_bart,
    learned_preludes,
    read_bart,
    table_names,
)
from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm_decoder import renamed
from kvgraph.models.layers import Precision

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
    fields = read_bart(
        reader,
        "BART",
        FIXED,
        bos_token_id=0,
        eos_token_ids=(2,),
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    config = BartConfig(**fields)
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, BartConfig)
    return build_bart(config, precision, *learned_preludes(config, precision))


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The decoder's names are shorter in graphs, the encoder's are the same."""
    assert isinstance(config, BartConfig)
    norm = {"layernorm_embedding": "embed_norm"}
    return {
        **table_names(config),
        **LEARNED_POSITIONS,
        **renamed(norm, "model.encoder.", "model.encoder."),
        **renamed(norm, "model.decoder.", "model."),
        **bart_names(),
        # Version numbers of old files.
        "model.encoder.version": None,
        "model.decoder.version": None,
    }


FAMILY = Family("bart", config_from_hf, build, weight_names, base_prefix="model.")
