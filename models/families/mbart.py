"""mBART: BART's embeddings, with a norm before each part of a layer and one behind the last layer of either side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgraph.models.bart_encoder_decoder import (
    POSITION_OFFSET,
    BartConfig,
    build_pre_norm_bart,
    learned_preludes,
    read_bart,
)
from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.families import bart
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm_decoder import renamed
from kvgraph.models.layers import Precision

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
    config = BartConfig(
        **read_bart(reader, "mBART", FIXED, bos_token_id=0, eos_token_ids=(2,), forced_eos_token_id=2)
    )
    reader.refuse_unread(config.model_type)
    return config


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, BartConfig)
    return build_pre_norm_bart(config, precision, *learned_preludes(config, precision))


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """BART's, and a norm behind the last layer of either side."""
    final = {"layer_norm": "norm"}
    return {
        **bart.weight_names(config),
        **renamed(final, "model.encoder.", "model.encoder."),
        **renamed(final, "model.decoder.", "model."),
    }


FAMILY = Family("mbart", config_from_hf, build, weight_names, base_prefix="model.")
