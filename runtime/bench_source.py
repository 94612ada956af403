"""Measuring models with an encoder: random sources, the time of encoding them, what a step reads of them."""

from __future__ import annotations

import time

import numpy as np
from tqdm import tqdm

from kvgraph.export.contract import Contract
from kvgraph.runtime.bench_report import BenchOptions, Timing
from kvgraph.runtime.element_types import element_type
from kvgraph.runtime.encoder_session import EncoderSession
from kvgraph.runtime.session import Session
from kvgraph.runtime.sources import SourcedSession

_SOURCE_TOKENS = 128


def check_source_tokens(contract: Contract, asked: int | None) -> int | None:
    """How many tokens a source has, by default 128 or as many as the encoder takes; None without an encoder.

    Raises:
        ValueError: So many do not fit, or there is no encoder.
    """
    encoder = contract.encoder
    if encoder is None:
        if asked is not None:
            raise ValueError(f"source_tokens is {asked}, the model has no encoder; leave it out")
        return None
    tokens = min(_SOURCE_TOKENS, encoder.max_positions) if asked is None else asked
    if tokens > encoder.max_positions:
        raise ValueError(
            f"source_tokens is {tokens}, the encoder takes {encoder.max_positions}; ask for fewer"
        )
    return tokens


def with_sources(session: EncoderSession, options: BenchOptions) -> tuple[Session, Timing]:
    """A session whose rows read random sources, and the time of encoding them, after one run that does not count."""
    encoder = session.contract.encoder
    assert encoder is not None
    assert options.source_tokens is not None
    shape = (options.batch_size, options.source_tokens)
    sources = np.random.default_rng(options.seed).integers(0, encoder.vocab_size, shape)
    lengths, durations_s = np.full(options.batch_size, options.source_tokens), []
    for _ in tqdm(range(options.runs + 1), desc="encoding", unit="run", disable=None):
        start = time.perf_counter()
        encoded = session.encode(sources, lengths)
        durations_s.append(time.perf_counter() - start)
    return SourcedSession(session, encoded), Timing.of(durations_s[1:])


def source_bytes(contract: Contract, source_tokens: int | None) -> int:
    """Bytes that a step reads of one row's source."""
    if contract.encoder is None or source_tokens is None:
        return 0
    return source_tokens * sum(
        int(tensor.shape[1]) * int(tensor.shape[3]) * element_type(tensor.dtype).carrier.itemsize
        for tensor in contract.encoder.cross
    )
