"""PyTorch behind the protocol of encoder-decoder sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgraph.export.architecture import encoder_contract
from kvgraph.export.contract import cross_key, cross_value
from kvgraph.export.load_module import load_module
from kvgraph.export.torch_session import StepResult, TorchCache, TorchSession
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.models.encoder_decoder import EncoderDecoder, KeyValue
from kvgraph.runtime.checks import check_source, check_source_of_row
from kvgraph.runtime.session import Cache, Floats, Ids


@dataclass(frozen=True, slots=True)
class TorchEncoded:
    """Sources as the decoder reads them, see `kvgraph.runtime.encoder_session.Encoded`.

    Attributes:
        cross: Keys and values [N, K, C, D] of each of the decoder's layers.
        encoder_length: [N] int64.
    """

    cross: tuple[KeyValue, ...]
    encoder_length: Tensor

    @property
    def num_sources(self) -> int:
        """N, how many there are."""
        return len(self.encoder_length)

    def read(self, name: str) -> Floats:
        """See `Encoded.read`."""
        for layer, pair in enumerate(self.cross):
            for known, tensor in zip((cross_key(layer), cross_value(layer)), pair, strict=True):
                if name == known:
                    return tensor.to(torch.float32).numpy().copy()
        raise ValueError(f"cross tensor {name!r} is unknown, the decoder has {len(self.cross)} layers")

    def rows(self, source_of_row: Ids) -> TorchEncoded:
        """The sources that rows read, one a row."""
        index = torch.from_numpy(source_of_row)
        pairs = tuple((key[index], value[index]) for key, value in self.cross)
        return TorchEncoded(pairs, self.encoder_length[index])


class TorchEncoderCache(TorchCache):
    """The decoder's buffers, and the sources that its rows read."""

    encoded: TorchEncoded | None = None


class TorchEncoderSession(TorchSession):
    """An encoder-decoder model in eager torch, see `kvgraph.runtime.encoder_session.EncoderSession`."""

    def __init__(self, model: EncoderDecoder, source: str) -> None:
        """Run `model`, whose parameters are set; `source` is what it was read from."""
        super().__init__(model, source)
        self._encoder_decoder = model
        self._encoder = encoder_contract(model)

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> TorchEncoderCache:
        """See `Session.allocate_cache`."""
        plain = super().allocate_cache(batch_size, limit)
        return TorchEncoderCache(self.contract, self._dtype, plain.batch_size, plain.limit)

    def encode(self, input_ids: Ids, encoder_length: Ids) -> TorchEncoded:
        """See `EncoderSession.encode`."""
        source = check_source(self._encoder, input_ids, encoder_length)
        ids, lengths = torch.from_numpy(source.input_ids), torch.from_numpy(source.encoder_length)
        with torch.no_grad():
            return TorchEncoded(tuple(self._encoder_decoder.encode(ids, lengths)), lengths)

    def attach(self, cache: Cache, encoded: TorchEncoded, source_of_row: Ids | None = None) -> None:
        """See `EncoderSession.attach`."""
        if not isinstance(cache, TorchEncoderCache):
            raise TypeError(f"cache is a {type(cache).__name__}, expected one that this session allocated")
        cache.encoded = encoded.rows(
            check_source_of_row(source_of_row, encoded.num_sources, cache.batch_size)
        )

    def _step(
        self,
        cache: TorchCache,
        past: Sequence[KeyValue],
        input_ids: Tensor,
        past_length: Tensor,
        positions: Tensor | None,
        new_length: Tensor | None,
    ) -> StepResult:
        if not isinstance(cache, TorchEncoderCache) or cache.encoded is None:
            raise ValueError("the cache's rows have no sources; call encode, then attach")
        encoded = cache.encoded
        result: StepResult = self._encoder_decoder(
            input_ids, past_length, past, encoded.cross, encoded.encoder_length, positions
        )
        return result


def open_torch_session(
    checkpoint: Checkpoint, dtype: str = "float32", residual_dtype: str | None = None
) -> TorchSession:
    """A session over every weight of a checkpoint, with or without an encoder.

    Raises:
        ValueError: The checkpoint is damaged or does not fit its config.
    """
    model = load_module(checkpoint, dtype, residual_dtype)
    if isinstance(model, EncoderDecoder):
        return TorchEncoderSession(model, checkpoint.source.name)
    return TorchSession(model, checkpoint.source.name)
