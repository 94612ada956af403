"""Perplexity of a text: how surprised a model is by its tokens, on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.parity_metrics import log_softmax
from kvgraph.runtime.session import Ids, Session

# Logits of one call hold at most so many values (64 MB), and a call takes at most so many windows.
_CALL_VALUES = 1 << 24
_CALL_WINDOWS = 8
# Rows shorter than this waste the matrix units, however large the vocabulary.
_LEAST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity of a text.

    Attributes:
        perplexity: exp of the mean negative log-likelihood.
        tokens: How many tokens were scored.
        windows: How many windows they were cut into.
        window: Most tokens of one.
    """

    perplexity: float
    tokens: int
    windows: int
    window: int


def measure_perplexity(
    session: Session, token_ids: Sequence[int], window: int, bos_token_id: int | None
) -> Perplexity:
    """Perplexity of a text in consecutive windows that know nothing of each other.

    With a BOS each window follows one, and every token is scored. Without, the first token of each window has
    nothing before it and is not scored.

    Args:
        session: Runs the prefill graph.
        token_ids: The text without BOS.
        window: Tokens of a window; the last may be shorter.
        bos_token_id: What each window begins with, or None.

    Raises:
        ValueError: The text is too short to score a token, or the window does not fit the model.
    """
    contract = session.contract
    if contract.encoder is not None:
        raise ValueError(
            "the model has an encoder: how likely a text is depends on its source, so a text alone has no perplexity; "
            "compare bundles with kvgraph compare"
        )
    limit = contract.capacity or contract.max_positions
    least = 1 if bos_token_id is not None else 2
    if not least <= window <= limit:
        raise ValueError(
            f"window is {window} tokens, expected {least} to {limit}, the positions of the model"
        )
    if len(token_ids) < least:
        raise ValueError(f"the text has {len(token_ids)} tokens, expected at least {least} to score one")
    prefix = [] if bos_token_id is None else [bos_token_id]
    texts = [np.array([*prefix, *token_ids[at : at + window]]) for at in range(0, len(token_ids), window)]
    # A last window of one token has nothing to score where there is no BOS.
    texts = [text for text in texts if len(text) > 1]
    batch = min(len(texts), _CALL_WINDOWS, max(1, _CALL_VALUES // (window * contract.vocab_size)))
    scores = [_score(session, texts[at : at + batch]) for at in range(0, len(texts), batch)]
    scored = np.concatenate(scores)
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(-scored.mean()))
    return Perplexity(perplexity, len(scored), len(texts), window)


def _score(session: Session, texts: Sequence[Ids]) -> NDArray[np.float64]:
    """Log-likelihood of every token of the texts but their first."""
    lengths = np.array([len(text) - 1 for text in texts])
    batch, longest = len(texts), int(lengths.max())
    padded = np.zeros((batch, longest + 1), np.int64)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    chunk = max(_LEAST_CHUNK, _CALL_VALUES // (batch * session.contract.vocab_size))
    cache = session.allocate_cache(batch, longest)
    scores = []
    for start in range(0, longest, chunk):
        stop = min(start + chunk, longest)
        ids, past = padded[:, start:stop], np.full(batch, start)
        positions = np.tile(np.arange(stop - start), (batch, 1))
        # Padding writes behind the row's own tokens, where they cannot see it.
        logits = session.prefill(cache, ids, past, positions, np.maximum(lengths - start, 1))
        own = np.arange(start, stop) < lengths[:, None]
        scores.append(_log_likelihood(logits[own], padded[:, start + 1 : stop + 1][own]))
    return np.concatenate(scores)


def _log_likelihood(logits: NDArray[np.float32], targets: Ids) -> NDArray[np.float64]:
    """Natural logarithm of the probability that each row of logits [R, V] gives to its target [R]."""
    if not np.isfinite(logits).all():
        raise ValueError(
            "the model gives logits that are not finite; kvgraph compare --layers finds the layer"
        )
    return np.array(
        [log_softmax(row.astype(np.float64))[target] for row, target in zip(logits, targets, strict=True)]
    )
