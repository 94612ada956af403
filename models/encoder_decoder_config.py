"""What the configuration of an encoder-decoder model has beside that of its decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_bos_token_id, read_dtype
from kvgraph.models.config_reader import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig(ModelConfig):
    """The fields of `ModelConfig` are the decoder's; the encoder's own follow.

    Attributes:
        source_vocab_size: Ids of a source; `vocab_size` where both sides read one table.
        encoder_layers: Layers of the encoder.
        encoder_attention_heads: H of the encoder.
        encoder_head_dim: D of the encoder.
        encoder_ffn_dim: Width of the encoder's feed-forward part.
        decoder_start_token_id: Token that the decoder's rows begin with; None where config.json does not say.
        forced_bos_token_id: Token that is taken for the first one, whatever the logits, if there is one.
        forced_eos_token_id: Token that is taken for the last one where a text reaches its greatest length, if any.
    """

    source_vocab_size: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_head_dim: int
    encoder_ffn_dim: int
    decoder_start_token_id: int | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None

    @property
    def max_source_positions(self) -> int:
        """Tokens that a source may have."""
        return self.max_position_embeddings


def read_decoding(
    reader: ConfigReader,
    *,
    bos_token_id: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    decoder_start_token_id: int | None = None,
    forced_eos_token_id: int | None = None,
) -> dict[str, Any]:
    """Type and tokens of a config.json; the arguments are the family's tokens where it leaves them out.

    Raises:
        ValueError: A value is malformed.
    """
    return {
        "bos_token_id": read_bos_token_id(reader, default=bos_token_id),
        "eos_token_ids": reader.token_ids("eos_token_id", default=eos_token_ids),
        "decoder_start_token_id": _one(reader, "decoder_start_token_id", decoder_start_token_id),
        "forced_bos_token_id": _one(reader, "forced_bos_token_id"),
        "forced_eos_token_id": _one(reader, "forced_eos_token_id", forced_eos_token_id),
        "dtype": read_dtype(reader),
    }


def shared_head_dim(reader: ConfigReader, size: int, heads: int, key: str) -> int:
    """D where heads share the hidden size.

    Raises:
        ValueError: They cannot.
    """
    if size % heads:
        raise reader.error(f"d_model is {size}, expected a multiple of {key} {heads}")
    return size // heads


def _one(reader: ConfigReader, key: str, default: int | None = None) -> int | None:
    ids = reader.token_ids(key, default=() if default is None else (default,))
    if len(ids) > 1:
        raise reader.error(f"{key} is {list(ids)}, expected one token id")
    return ids[0] if ids else None
