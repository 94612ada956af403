"""The contract that a decoder's graphs will keep."""

from __future__ import annotations

from kvgraph.export.contract import Contract, EncoderContract, scatter_state
from kvgraph.models.encoder_decoder import Model


def decoder_contract(
    decoder: Model, capacity: int | None = None, encoder: EncoderContract | None = None
) -> Contract:
    """Vocabulary, positions and cache of `decoder`, with T as a number where `capacity` is one.

    Args:
        decoder: A decoder, or a model that has one.
        capacity: T.
        encoder: What the encoder beside it promises.
    """
    dtype = str(decoder.precision.compute).removeprefix("torch.")
    return Contract(
        vocab_size=decoder.config.vocab_size,
        num_layers=decoder.config.num_hidden_layers,
        max_positions=decoder.config.max_positions,
        takes_new_length=decoder.prelude.takes_new_length,
        state=scatter_state(decoder.kv_shapes, dtype, capacity),
        encoder=encoder,
    )
