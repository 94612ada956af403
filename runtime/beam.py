"""Beam search: several continuations of a prompt at once, of which the one with the best score is returned.

A beam's score is the sum of its tokens' log-probabilities. At every step the likeliest tokens of all beams compete;
those that end a text become finished texts, and of the others the best `num_beams` go on. A finished text's score is
divided by its length to the power of `length_penalty`, and the best `num_beams` of them are kept. Scores are float32,
as in `transformers`, so that both take the same way where two scores are close.

A beam lies in one row of the cache. The first of a beam's continuations stays in its row, and only the others are
copied, each into the row of a beam that has none, from the slot on where the two differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.generation import FinishReason, Generation, GenerationParams
from kvgraph.runtime.prefill import prefill_prompts
from kvgraph.runtime.sampling import check_largest, penalize_repetition
from kvgraph.runtime.session import Floats, Ids, Session
from kvgraph.runtime.text import Detokenizer
from kvgraph.runtime.tokenizer import Tokenizer

_BLOCK = 512
_LARGEST_EXPONENT = math.log(float(np.finfo(np.float32).max))


def beam_search(
    session: Session,
    prompts: Sequence[Ids],
    most: Sequence[int],
    params: GenerationParams,
    eos_token_ids: Collection[int],
    tokenizer: Tokenizer | None = None,
) -> list[Generation]:
    """The best text of each prompt.

    Args:
        session: Runs the graphs.
        prompts: Checked token ids of each row.
        most: Most new tokens of each row, at least one.
        params: With `num_beams` above 1.
        eos_token_ids: Tokens of which any ends a text.
        tokenizer: Gives texts; without one they are empty.

    Raises:
        ValueError: The vocabulary is too small for so many beams, the length penalty leaves the range of float32, or
            the session does not take so many rows.
    """
    vocab_size = session.contract.vocab_size
    searches = [
        Beams(prompt, limit, params, eos_token_ids, vocab_size)
        for prompt, limit in zip(prompts, most, strict=True)
    ]
    _search(session, prompts, searches, params)
    return [search.best(tokenizer) for search in searches]


def _search(
    session: Session, prompts: Sequence[Ids], searches: Sequence[Beams], params: GenerationParams
) -> None:
    """Run all searches to their ends; those that are done before others stay in the batch as they are."""
    rows, beams = len(prompts), params.num_beams
    # Before anything is computed: an engine may not take so many rows.
    cache = session.allocate_cache(rows * beams)
    prefilled = session.allocate_cache(rows)
    logits = prefill_prompts(session, prefilled, prompts, np.zeros(rows, np.int64), params.prefill_chunk)
    past = np.repeat(np.array([len(prompt) for prompt in prompts], np.int64), beams)
    latest = np.zeros((rows * beams, 1), np.int64)
    # At first every beam takes the whole of its prompt's row.
    source, start = np.repeat(np.arange(rows), beams), np.zeros_like(past)
    for row, search in enumerate(searches):
        search.advance(logits[row : row + 1])
        if not search.done:
            latest[row * beams : (row + 1) * beams, 0] = search.tokens[:, -1]
    if not all(search.done for search in searches):
        cache.gather_rows(prefilled, source, start, past)
    del prefilled
    while not all(search.done for search in searches):
        logits = session.decode(cache, latest, past)[:, 0]
        source, start = np.arange(rows * beams), past.copy()
        for row, search in enumerate(searches):
            place = slice(row * beams, (row + 1) * beams)
            if search.done:
                continue
            parents, shared = search.advance(logits[place])
            if not search.done:
                past[place] += 1
                latest[place, 0] = search.tokens[:, -1]
                source[place], start[place] = row * beams + parents, len(prompts[row]) + shared
        cache.gather_rows(cache, source, start, past)


class Beams:
    """The beams of one prompt, and the texts that they have finished.

    Args:
        prompt: Its token ids.
        most: Most new tokens.
        params: How many beams, and how they are scored.
        eos_token_ids: Tokens of which any ends a text.
        vocab_size: V.

    Attributes:
        tokens: [beams, length] int64, what each beam has written; one beam without tokens at first.
        scores: [beams] float32, the sums of their log-probabilities.
        finished: Score and tokens of the best texts that have ended, best first.
        done: Whether no beam goes on.
    """

    def __init__(
        self,
        prompt: Ids,
        most: int,
        params: GenerationParams,
        eos_token_ids: Collection[int],
        vocab_size: int,
    ) -> None:
        self.tokens: Ids = np.zeros((1, 0), np.int64)
        self.scores: Floats = np.zeros(1, np.float32)
        self.finished: list[tuple[np.float32, Ids]] = []
        self.done = False
        self._params, self._most = params, most
        self._eos = np.unique(np.array(list(eos_token_ids), np.int64))
        self._prompt = prompt
        # So many that `num_beams` of them go on, even if every beam's likeliest tokens are the ends.
        self._candidates = params.num_beams * max(2, 1 + len(self._eos))
        if self._candidates > vocab_size:
            raise ValueError(
                f"num_beams is {params.num_beams} with {len(self._eos)} end tokens, which asks for "
                f"{self._candidates} different tokens of a vocabulary of {vocab_size}; take fewer beams"
            )
        if abs(params.length_penalty) * math.log(most) > _LARGEST_EXPONENT:
            raise ValueError(
                f"length_penalty is {params.length_penalty}: {most} new tokens to that power leave the range of "
                "float32; take one nearer to 0, or fewer tokens"
            )

    def advance(self, logits: Floats) -> tuple[Ids, Ids]:
        """Give every beam one more token.

        Args:
            logits: [beams, V] float32, after the latest token of each beam.

        Returns:
            For each of the new beams, [beams] each: which of the old ones it continues, and how many of its tokens
            the old one in its place has as well. Empty if none goes on.

        Raises:
            RuntimeError: The logits hold NaN or infinity.
        """
        scores = self._score(logits).reshape(-1)
        best = largest(scores, self._candidates)
        parents, token_ids = np.divmod(best, logits.shape[1])
        length = self.tokens.shape[1] + 1
        ends = np.isin(token_ids, self._eos) | (length == self._most)
        # A text that ends ranks among the texts only if it ranks among the beams, and if its tokens may come at all.
        ranked = ends & np.isfinite(scores[best])
        for index in np.flatnonzero(ranked[: self._params.num_beams]):
            tokens = np.append(self.tokens[parents[index]], token_ids[index])
            self.finished.append((self._per_length(scores[best[index]], length), tokens))
        self.finished = sorted(self.finished, key=lambda text: -text[0])[: self._params.num_beams]
        going = np.flatnonzero(~ends)[: self._params.num_beams]
        self.done = len(going) == 0 or not self._may_improve(scores[best[going[0]]], length)
        if self.done:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        going = going[_stay_in_place(parents[going])]
        parents = parents[going]
        shared = _shared_length(self.tokens[parents], self.tokens)
        self.tokens = np.concatenate([self.tokens[parents], token_ids[going, None]], axis=1)
        self.scores = scores[best[going]]
        return parents, shared

    def best(self, tokenizer: Tokenizer | None) -> Generation:
        """The finished text with the best score."""
        score, tokens = self.finished[0]
        token_ids = tuple(tokens.tolist())
        reason: FinishReason = "eos" if token_ids[-1] in self._eos else "length"
        text = ""
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, self._prompt.tolist())
            shown = token_ids[:-1] if reason == "eos" else token_ids
            text = "".join(map(detokenizer.push, shown)) + detokenizer.flush()
        return Generation(token_ids, text, reason, score=float(score))

    def _score(self, logits: Floats) -> Floats:
        """Scores [beams, V] of every beam with every token."""
        scores = log_softmax(logits)
        penalty = self._params.sampling.repetition_penalty
        for beam, score in enumerate(self.scores):
            if penalty != 1:
                seen = np.union1d(self._prompt, self.tokens[beam])
                scores[beam] = penalize_repetition(scores[beam], seen, penalty)
            scores[beam] = self._params.rules.apply(scores[beam], self.tokens.shape[1], self._most)
            scores[beam] += score
        return scores

    def _per_length(self, score: np.float32, length: int) -> np.float32:
        return np.float32(score / np.float32(length**self._params.length_penalty))

    def _may_improve(self, best: np.float32, length: int) -> bool:
        """Whether, as `early_stopping` sees it, a beam may yet overtake the worst of the finished texts."""
        params = self._params
        if len(self.finished) < params.num_beams:
            return True
        if params.early_stopping is True:
            return False
        longest = params.early_stopping == "never" and params.length_penalty > 0
        return bool(self._per_length(best, self._most if longest else length) > self.finished[-1][0])


def log_softmax(logits: Floats) -> Floats:
    """Log-probabilities [beams, V] of [beams, V] logits.

    Raises:
        RuntimeError: The logits hold NaN or infinity.
    """
    top = logits.max(axis=1, keepdims=True)
    for value in top[:, 0].tolist():
        check_largest(value)
    shifted: Floats = logits - top
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def largest(values: NDArray[np.float32], count: int) -> Ids:
    """Indices of the `count` largest of [n] values, largest first; of equal ones the first."""
    # The count-th largest of the blocks' maxima is a floor of what is sought, and few values lie above it.
    starts = np.arange(0, len(values), _BLOCK)
    maxima = np.maximum.reduceat(values, starts)
    found = np.arange(len(values))
    if len(maxima) > count:
        floor = np.partition(maxima, len(maxima) - count)[len(maxima) - count]
        found = np.flatnonzero(values >= floor)
    return found[np.argsort(-values[found], kind="stable")[:count]]


def _stay_in_place(parents: Ids) -> Ids:
    """An order of the beams in which the first child of each parent has its parent's place."""
    order = np.full(len(parents), -1)
    others = []
    for rank, parent in enumerate(parents.tolist()):
        if order[parent] < 0:
            order[parent] = rank
        else:
            others.append(rank)
    order[order < 0] = others
    return order


def _shared_length(tokens: Ids, others: Ids) -> Ids:
    """How many tokens each row of two arrays [beams, length] begins with in common; `others` may be one row."""
    behind = np.ones((len(tokens), 1), np.bool_)
    shared: Ids = np.concatenate([tokens != others, behind], axis=1).argmax(axis=1)
    return shared
