"""M2M100 and NLLB: Pegasus, with positions that begin behind the padding token's number and turn a little faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgraph.models.bart_encoder_decoder import BartConfig, build_pre_norm_bart, embedding_tables, read_bart
from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.cross_attention import SourceMask
from kvgraph.models.decoder import Prelude
from kvgraph.models.encoder_decoder import EncoderDecoder
from kvgraph.models.families import pegasus
from kvgraph.models.family import Family
from kvgraph.models.layers import Embedding, Precision
from kvgraph.models.positions import CausalMask, Shared
from kvgraph.models.sinusoidal_positions import BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class M2M100Config(BartConfig):
    """The configuration of M2M100.

    Attributes:
        pad_token_id: The number before the first position's.
    """

    pad_token_id: int


def config_from_hf(hf: Mapping[str, Any]) -> M2M100Config:
    """Read an `m2m_100` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf)
    fields = read_bart(
        reader,
        "M2M100",
        pegasus.FIXED,
        activation="relu",
        scale_embedding=True,
        bos_token_id=0,
        eos_token_ids=(2,),
        decoder_start_token_id=2,
    )
    # Two angles at least, and as many sines as cosines.
    if fields["hidden_size"] % 2 or fields["hidden_size"] < 4:
        raise reader.error(f"d_model is {fields['hidden_size']}, expected an even number of at least 4")
    config = M2M100Config(**fields, pad_token_id=reader.integer("pad_token_id", default=1, minimum=0))
    reader.ignore("extra_pos_embeddings")
    reader.refuse_unread(config.model_type)
    return config


class M2M100Prelude(Prelude):
    """Token embedding plus sines, then cosines, of the position; a padding token within a text counts as any other."""

    def __init__(
        self, config: M2M100Config, embed_tokens: Embedding, shared: Shared, precision: Precision
    ) -> None:
        super().__init__(embed_tokens, [shared], precision.residual, config.embedding_scale)
        self.first_position = config.pad_token_id + 1

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Prelude.embed`."""
        rows = super().embed(input_ids, positions)
        half = rows.shape[-1] // 2
        # From 1 down to 1 / 10000, both of them included.
        exponents = torch.arange(half, dtype=torch.float32, device=rows.device) / (half - 1)
        turned = (positions + self.first_position).unsqueeze(-1).to(torch.float32) * BASE**-exponents
        return rows + torch.cat((turned.sin(), turned.cos()), dim=-1).to(self.residual)


def build(config: ModelConfig, precision: Precision) -> EncoderDecoder:
    """The module with unset parameters."""
    assert isinstance(config, M2M100Config)
    source_table, table = embedding_tables(config, precision)
    source = M2M100Prelude(config, source_table, SourceMask(), precision)
    target = M2M100Prelude(config, table, CausalMask(), precision)
    return build_pre_norm_bart(config, precision, source, target, logits_bias=False)


FAMILY = Family("m2m_100", config_from_hf, build, pegasus.weight_names, base_prefix="model.")
