"""What a runtime of an encoder-decoder model offers beside `Session`: a third graph, run once for each source.

The sources are encoded apart from any cache, so that several caches can read them and several rows (the beams of a
text) can read one. From then on a step is that of a decoder-only model: the decoder's rows begin with a start token.
"""

from __future__ import annotations

from typing import Protocol, TypeGuard

from kvgraph.runtime.session import Cache, Floats, Ids, Session


class Encoded(Protocol):
    """What the encoder made of some sources."""

    @property
    def num_sources(self) -> int:
        """N, how many there are."""
        ...

    def read(self, name: str) -> Floats:
        """A cross tensor by its name, as a float32 copy [N, K, C, D]."""
        ...


class EncoderSession(Session, Protocol):
    """A session whose contract has an `encoder`. Its caches take part in steps once they have been given sources."""

    def encode(self, input_ids: Ids, encoder_length: Ids) -> Encoded:
        """What the decoder reads of each source.

        Args:
            input_ids: [N, C] int64; shorter sources are padded on the right with any valid id.
            encoder_length: [N] int64, tokens of each source.
        """
        ...

    def attach(self, cache: Cache, encoded: Encoded, source_of_row: Ids | None = None) -> None:
        """Let the rows of a cache read sources, in place of those that they read before.

        Args:
            cache: One of this session.
            encoded: From this session.
            source_of_row: [B] int64, which of the N sources each row reads; default: N = B, each row its own.
        """
        ...


def has_encoder(session: Session) -> TypeGuard[EncoderSession]:
    """Whether a session is one of an encoder-decoder model."""
    return session.contract.encoder is not None
