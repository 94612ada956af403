"""From logits to a token: penalties, temperature, truncation and the draw, in the order of `transformers`.

Repetition penalty, temperature, top-k, top-p, min-p. Probabilities are relative to the largest one (weight 1), so
that no temperature overflows and min-p is a plain threshold; they are float32 and summed in float64. A vocabulary
of 128256 makes arrays so large that each new one costs more than the arithmetic: few are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvgraph.runtime.session import Floats, Ids

_BLOCK = 512

# In float32 a lower temperature would be 0; this one already takes the likeliest token alone.
_LOWEST_TEMPERATURE = 1e-30

# Beyond these, a logit of ordinary size leaves the range of float32.
_PENALTIES = (1e-30, 1e30)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: Keep the k likeliest tokens (and those as likely as the last of them); 0 keeps all.
        top_p: Keep the fewest tokens whose probabilities reach p, at least one; 1 keeps all.
        min_p: Keep tokens at least min_p times as likely as the likeliest; 0 keeps all.
        repetition_penalty: Logits of tokens in the prompt or the text so far are divided by it where positive and
            multiplied where negative; 1 changes nothing.
        seed: Row i draws with seed + i, or with the i-th of several seeds; None draws differently every time.

    Raises:
        TypeError: A field is not a number.
        ValueError: A field is not finite or out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0)
        if not _PENALTIES[0] <= self.repetition_penalty <= _PENALTIES[1]:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty:g}, expected {_PENALTIES[0]:g} to "
                f"{_PENALTIES[1]:g}; 1 switches it off"
            )
        _check_integer("top_k", self.top_k)
        if self.seed is not None:
            for seed in (self.seed,) if isinstance(self.seed, int) else self.seed:
                _check_integer("seed", seed)

    def row_seeds(self, rows: int) -> list[int | None]:
        """The seed of each row.

        Raises:
            ValueError: There are several seeds, but not one for each row.
        """
        if self.seed is None:
            return [None] * rows
        if isinstance(self.seed, int):
            return [self.seed + row for row in range(rows)]
        if len(self.seed) != rows:
            raise ValueError(
                f"{len(self.seed)} seeds for {rows} rows; give one seed for each row, or one in all"
            )
        return list(self.seed)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log-probability of a token under the model itself: before penalties, temperature and truncation.

    Attributes:
        token_id: The token.
        logprob: Its log-probability.
        top: The likeliest tokens and their log-probabilities, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of a batch; each row has its own random numbers and its own history.

    Args:
        params: How to choose.
        vocab_size: V.
        prompts: Token ids of each row so far.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, prompts: Sequence[ArrayLike]) -> None:
        self._params = params
        self._generators = [np.random.default_rng(seed) for seed in params.row_seeds(len(prompts))]
        self._seen: NDArray[np.bool_] | None = None
        if params.repetition_penalty != 1:
            self._seen = np.zeros((len(prompts), vocab_size), np.bool_)
            for row, prompt in enumerate(prompts):
                self._seen[row, np.asarray(prompt, np.int64)] = True

    def sample(self, row: int, logits: Floats) -> int:
        """The next token of a row.

        Args:
            row: Which row.
            logits: [V] float32.

        Raises:
            RuntimeError: The logits hold NaN or infinity.
        """
        if self._seen is not None:
            seen = np.flatnonzero(self._seen[row])
            logits = penalize_repetition(logits, seen, self._params.repetition_penalty)
        if self._params.temperature == 0:
            token = greedy(logits)
        else:
            token_ids, weights = keep_candidates(logits, self._params)
            index = _index_of_share(weights, self._generators[row].random(), "right")
            token = index if token_ids is None else int(token_ids[index])
        if self._seen is not None:
            self._seen[row, token] = True
        return token


def greedy(logits: Floats) -> int:
    """The likeliest token of [V] logits; the first of equals.

    Raises:
        RuntimeError: The logits hold NaN or infinity.
    """
    token = int(logits.argmax())
    # argmax stops at a NaN, so that this one value speaks for all of them.
    check_largest(float(logits[token]))
    return token


def penalize_repetition(logits: Floats, seen: Ids, penalty: float) -> Floats:
    """A copy of [V] logits with those of the tokens `seen` made less likely (penalty > 1) or more."""
    logits = logits.copy()
    values = logits[seen]
    logits[seen] = np.where(values < 0, values * np.float32(penalty), values / np.float32(penalty))
    return logits


def keep_candidates(logits: Floats, params: SamplingParams) -> tuple[Ids | None, Floats]:
    """Tokens that may be drawn, at a temperature above 0, and their probabilities up to a common factor.

    Args:
        logits: [V] float32.
        params: Temperature and truncation.

    Returns:
        Token ids (None for all of them in order) and the weight of each.

    Raises:
        RuntimeError: The logits hold NaN or infinity.
    """
    largest = logits.max()
    check_largest(float(largest))
    token_ids = _top_k(logits, params.top_k)
    weights = (logits if token_ids is None else logits[token_ids]) - largest
    with np.errstate(over="ignore", under="ignore"):  # a low temperature takes all but the largest to -inf
        weights /= np.float32(max(params.temperature, _LOWEST_TEMPERATURE))
        np.exp(weights, out=weights)
    if params.top_p < 1:
        token_ids, weights = _select(token_ids, weights, _nucleus(weights, params.top_p))
    if params.min_p > 0:
        token_ids, weights = _select(token_ids, weights, np.flatnonzero(weights >= params.min_p))
    return token_ids, weights


def log_probability(logits: Floats, token_id: int, top: int = 0) -> Logprob:
    """Log-probability of a token, and of the `top` likeliest, from [V] logits."""
    shifted = logits - logits.max()
    best = np.argpartition(shifted, -min(top, len(shifted)))[-top:].tolist() if top > 0 else []
    best.sort(key=lambda token: (-shifted[token], token))
    values = shifted[[token_id, *best]].astype(np.float64)
    np.exp(shifted, out=shifted)
    first, *rest = (values - math.log(shifted.sum(dtype=np.float64))).tolist()
    return Logprob(token_id, first, tuple(zip(best, rest, strict=True)))


def _select(token_ids: Ids | None, weights: Floats, kept: Ids) -> tuple[Ids, Floats]:
    return (kept if token_ids is None else token_ids[kept]), weights[kept]


def _top_k(logits: Floats, top_k: int) -> Ids | None:
    size = len(logits)
    if top_k == 0 or top_k >= size:
        return None
    threshold = np.partition(logits, size - top_k)[size - top_k]
    return np.flatnonzero(logits >= threshold)


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Indices of the fewest weights that make up `top_p` of the sum, in ascending order."""
    # Sorting the values takes a seventh of the time of sorting their indices.
    descending = np.sort(weights)[::-1]
    count = _index_of_share(descending, top_p, "left") + 1
    smallest = descending[count - 1]
    kept = np.flatnonzero(weights >= smallest)
    if (surplus := len(kept) - count) > 0:  # of those as unlikely as the last, the first ones stay
        equal = kept[weights[kept] == smallest]
        kept = np.setdiff1d(kept, equal[-surplus:], assume_unique=True)
    return kept


def _index_of_share(weights: Floats, share: float, side: Literal["left", "right"]) -> int:
    """The first index at which the running sum reaches a share of the whole ("left"), or exceeds it ("right").

    With "right" and a random share, index i comes with probability weights[i] / sum.
    """
    # Running sums of blocks first: one array of all of them takes ten times as long.
    starts = np.arange(0, len(weights), _BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    # Rounding must not make a share of less than 1 the whole, which nothing exceeds.
    wanted = share * blocks[-1] if side == "left" else min(share * blocks[-1], np.nextafter(blocks[-1], 0.0))
    block = int(np.searchsorted(blocks, wanted, side))
    inside = weights[starts[block] : starts[block] + _BLOCK]
    before = blocks[block - 1] if block > 0 else 0.0
    index = int(np.searchsorted(before + np.cumsum(inside, dtype=np.float64), wanted, side))
    if index == len(inside):  # the two ways of adding differ in the last digit: take the last that counts
        index = int(np.flatnonzero(inside)[-1])
    return int(starts[block]) + index


def check_largest(value: float) -> None:
    """Raise RuntimeError where the largest of some logits is NaN or infinity."""
    if not math.isfinite(value):
        raise RuntimeError(
            f"the largest logit is {value}, expected a finite number: the model has overflowed; "
            "kvgraph compare --layers names the layer"
        )


def _check_number(name: str, value: float, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} is {value!r}, expected a number")
    if not (math.isfinite(value) and low <= value <= high):
        bounds = f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"
        raise ValueError(f"{name} is {value}, expected a finite number, {bounds}")


def _check_integer(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    if value < 0:
        raise ValueError(f"{name} is {value}, expected 0 or more")
