"""Sources in front of a decoder: what turns an encoder-decoder session into one that generates as any other does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvgraph.export.contract import Contract
from kvgraph.runtime.encoder_session import Encoded, EncoderSession
from kvgraph.runtime.session import Cache, Floats, Ids, SessionInfo


class SourcedSession:
    """An encoder-decoder session whose caches read given sources, see `kvgraph.runtime.session.Session`.

    A cache has a row for each source, or `n` rows for each, one source after the other.
    """

    def __init__(self, session: EncoderSession, encoded: Encoded) -> None:
        self._session = session
        self._encoded = encoded

    @property
    def contract(self) -> Contract:
        """What the graphs promise."""
        return self._session.contract

    @property
    def info(self) -> SessionInfo:
        """What the session runs on."""
        return self._session.info

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> Cache:
        """A cache of the session that has been given the sources.

        Raises:
            ValueError: There are not as many rows for each source.
        """
        each, rest = divmod(batch_size, self._encoded.num_sources)
        if rest or not each:
            raise ValueError(
                f"batch_size is {batch_size}, expected a multiple of the {self._encoded.num_sources} sources"
            )
        cache = self._session.allocate_cache(batch_size, limit)
        self._session.attach(cache, self._encoded, np.repeat(np.arange(self._encoded.num_sources), each))
        return cache

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        """Logits [B, N, V] of the session."""
        return self._session.prefill(cache, input_ids, past_length, logit_positions, new_length)

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        """Logits [B, 1, V] of the session."""
        return self._session.decode(cache, input_ids, past_length)

    def hidden_states(self) -> tuple[Floats, ...]:
        """Residuals of the session's latest call."""
        return self._session.hidden_states()


def encode_sources(session: EncoderSession, sources: Sequence[ArrayLike]) -> Encoded:
    """What the decoder reads of sources of unequal length.

    Raises:
        TypeError: A source is not made of integers.
        ValueError: A source is empty, too long or holds an id out of range.
    """
    if not len(sources):
        raise ValueError("there are no sources, expected at least one")
    rows = [_check_source(row, source) for row, source in enumerate(sources)]
    lengths = np.array([len(row) for row in rows], np.int64)
    padded = np.zeros((len(rows), int(lengths.max())), np.int64)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    return session.encode(padded, lengths)


def _check_source(row: int, source: ArrayLike) -> Any:
    ids = np.asarray(source)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(
            f"source {row} has shape {list(ids.shape)}, expected one dimension with at least one token"
        )
    if ids.dtype.kind not in "iu":
        raise TypeError(f"source {row} is of {ids.dtype}, expected integers")
    return ids
