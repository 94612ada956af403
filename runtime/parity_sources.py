"""Teacher-forced comparison of two encoder-decoder sessions: what they make of the sources, then every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvgraph.export.contract import EncoderContract
from kvgraph.runtime.encoder_session import Encoded, EncoderSession
from kvgraph.runtime.parity import compare_sessions
from kvgraph.runtime.parity_bands import Band
from kvgraph.runtime.parity_metrics import TensorError, largest
from kvgraph.runtime.parity_report import ParityReport
from kvgraph.runtime.sources import SourcedSession, encode_sources


def compare_encoder_decoders(
    reference: EncoderSession,
    candidate: EncoderSession,
    sources: Sequence[ArrayLike],
    targets: Sequence[ArrayLike],
    *,
    band: Band,
    **options: Any,
) -> ParityReport:
    """The errors of `candidate` against `reference` over sources and the decoder's tokens.

    Args:
        reference: What is right.
        candidate: What is judged.
        sources: Token ids of each source.
        targets: Token ids of the decoder's row for each, the start token first.
        band: Which errors are accepted.
        options: Of `compare_sessions`.

    Raises:
        ValueError: The sessions are of different models, or the rows do not fit them.
    """
    if len(sources) != len(targets):
        raise ValueError(f"there are {len(sources)} sources and {len(targets)} targets, expected a pair each")
    encoded = encode_sources(reference, sources), encode_sources(candidate, sources)
    sessions = SourcedSession(reference, encoded[0]), SourcedSession(candidate, encoded[1])
    report = compare_sessions(*sessions, targets, band=band, **options)
    contract = candidate.contract.encoder
    assert contract is not None
    lengths = [len(np.asarray(source)) for source in sources]
    return replace(report, cross=compare_encoded(*encoded, contract, lengths, band))


def compare_encoded(
    reference: Encoded, candidate: Encoded, contract: EncoderContract, lengths: Sequence[int], band: Band
) -> tuple[TensorError, ...]:
    """Error of each layer's keys and values of the sources, padding left out; the worse of the two."""
    pairs = []
    for tensor in contract.cross:
        both = [
            np.concatenate([rows[:, :length].ravel() for rows, length in zip(values, lengths, strict=True)])
            for values in (reference.read(tensor.name), candidate.read(tensor.name))
        ]
        with np.errstate(invalid="ignore"):
            pairs.append(TensorError(largest(both[0] - both[1]), band.tolerance(largest(both[0]))))
    keys_and_values = zip(pairs[::2], pairs[1::2], strict=True)
    return tuple(max(pair, key=lambda error: error.share) for pair in keys_and_values)
