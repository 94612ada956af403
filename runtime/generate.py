"""The loop: prefill once, then a token a row and a step until every row has ended.

Rows may have prompts of different lengths and end at different steps. A row that has ended stays in the batch with
its own `past_length`: what is written there lies behind everything the row can see, so it disturbs nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvgraph.runtime.beam import beam_search
from kvgraph.runtime.generation import Event, FinishReason, Generation, GenerationParams, collect
from kvgraph.runtime.prefill import prefill_prompts
from kvgraph.runtime.sampling import Logprob, Sampler, log_probability
from kvgraph.runtime.session import Cache, Ids, Session
from kvgraph.runtime.text import Detokenizer, StopMatcher
from kvgraph.runtime.tokenizer import Tokenizer


def generate(
    session: Session,
    prompts: Sequence[ArrayLike],
    params: GenerationParams,
    tokenizer: Tokenizer | None = None,
) -> list[Generation]:
    """One generation a prompt; arguments and errors as for `stream`, and those of `beam_search`."""
    if params.num_beams == 1 or params.max_new_tokens == 0:
        params = replace(params, num_beams=1)
        return collect(stream(session, prompts, params, tokenizer), len(prompts))
    rows = _check_prompts(session, prompts, tokenizer)
    limit = session.contract.capacity or session.contract.max_positions
    most = [_room(row, prompt, params.max_new_tokens, limit) for row, prompt in enumerate(rows)]
    return beam_search(session, rows, most, params, _end_tokens(params, tokenizer), tokenizer)


def stream(
    session: Session,
    prompts: Sequence[ArrayLike],
    params: GenerationParams,
    tokenizer: Tokenizer | None = None,
    cache: Cache | None = None,
    past_length: Sequence[int] | None = None,
) -> Iterator[Event]:
    """Events as tokens are made; everything is checked before anything is computed.

    Args:
        session: Runs the graphs.
        prompts: Token ids of each row. An empty prompt begins with the tokenizer's BOS.
        params: How far to generate, and how.
        tokenizer: Gives texts; without one they are empty, and there are no stop strings.
        cache: One row a prompt; default a new one. It may be used again after the events are read.
        past_length: How many tokens of each prompt `cache` holds from before, fewer than the prompt has.

    Raises:
        TypeError: A prompt is not made of integers.
        ValueError: A prompt is empty, holds an id out of range or does not fit into the cache.
    """
    if params.num_beams > 1:
        raise ValueError(
            f"num_beams is {params.num_beams}: which beam is the best shows at the end only, so there is nothing to "
            "stream; use generate, or num_beams=1"
        )
    rows = _check_prompts(session, prompts, tokenizer)
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the bundle has none; stop on eos_token_ids")
    cache = session.allocate_cache(len(rows)) if cache is None else cache
    most = [_room(row, prompt, params.max_new_tokens, cache.limit) for row, prompt in enumerate(rows)]
    past = _check_past(past_length, rows)
    sampler = Sampler(params.sampling, session.contract.vocab_size, rows)
    writers = [_Row(row, prompt, most[row], params, tokenizer) for row, prompt in enumerate(rows)]
    if params.max_new_tokens == 0:
        return (Event(row, None, "", finish_reason="length") for row in range(len(rows)))
    return _steps(session, cache, rows, past, writers, sampler, params)


def _steps(
    session: Session,
    cache: Cache,
    prompts: Sequence[Ids],
    past_length: Ids,
    rows: list[_Row],
    sampler: Sampler,
    params: GenerationParams,
) -> Iterator[Event]:
    logits = prefill_prompts(session, cache, prompts, past_length, params.prefill_chunk)
    past = np.array([len(prompt) for prompt in prompts], np.int64)
    running = np.ones(len(rows), np.int64)
    input_ids = np.zeros((len(rows), 1), np.int64)
    while True:
        events = []
        for row in rows:
            scores = params.rules.apply(logits[row.index], row.made, row.most)
            token = sampler.sample(row.index, scores)
            logprob = None
            if params.logprobs is not None:
                logprob = log_probability(scores, token, params.logprobs)
            event = row.accept(token, logprob)
            input_ids[row.index] = token
            running[row.index] = event.finish_reason is None
            events.append(event)
        rows = [row for row in rows if running[row.index]]
        # Nothing of the session's is used from here on: whoever reads the events may use it for something else.
        yield from events
        if not rows:
            return
        logits = session.decode(cache, input_ids, past)[:, 0]
        past += running


class _Row:
    """The text of one row, and whether it has ended."""

    def __init__(
        self, index: int, prompt: Ids, most: int, params: GenerationParams, tokenizer: Tokenizer | None
    ) -> None:
        self.index = index
        self.most = most
        self.made = 0
        self._eos = _end_tokens(params, tokenizer)
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt.tolist())
        self._stop = StopMatcher(params.stop)

    def accept(self, token_id: int, logprob: Logprob | None) -> Event:
        """The event of one more token."""
        self.made += 1
        reason: FinishReason | None = None
        text, stopped = "", False
        if token_id in self._eos:
            reason = "eos"
        else:
            if self._detokenizer is not None:
                text, stopped = self._stop.push(self._detokenizer.push(token_id))
            if stopped:
                reason = "stop"
            elif self.made == self.most:
                reason = "length"
        if reason in ("eos", "length"):
            text += self._flush()
        return Event(self.index, token_id, text, logprob, reason)

    def _flush(self) -> str:
        if self._detokenizer is None:
            return ""
        text, stopped = self._stop.push(self._detokenizer.flush())
        return text if stopped else text + self._stop.flush()


def _end_tokens(params: GenerationParams, tokenizer: Tokenizer | None) -> frozenset[int]:
    eos = params.eos_token_ids
    if eos is None:
        eos = () if tokenizer is None else tokenizer.eos_token_ids
    return frozenset(eos)


def _check_prompts(session: Session, prompts: Sequence[ArrayLike], tokenizer: Tokenizer | None) -> list[Ids]:
    if len(prompts) == 0:
        raise ValueError("there are no prompts, expected at least one")
    return [_check_prompt(row, prompt, session, tokenizer) for row, prompt in enumerate(prompts)]


def _check_prompt(row: int, prompt: ArrayLike, session: Session, tokenizer: Tokenizer | None) -> Ids:
    """A prompt as [tokens] int64, not empty."""
    ids = _as_array(row, prompt)
    if ids.size == 0:
        if tokenizer is None or tokenizer.bos_token_id is None:
            raise ValueError(
                f"prompt {row} has no tokens, and there is no BOS to begin with; give at least one"
            )
        return np.array([tokenizer.bos_token_id], np.int64)
    if ids.dtype.kind not in "iuO":
        raise TypeError(f"prompt {row} is of {ids.dtype}, expected integers")
    if ids.ndim != 1:
        raise ValueError(f"prompt {row} has shape {list(ids.shape)}, expected one dimension")
    vocab_size = session.contract.vocab_size
    wrong = (ids < 0) | (ids >= vocab_size)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"prompt {row}: token {place} is {ids[place]}, expected 0 <= id < {vocab_size} (the vocabulary)"
        )
    return ids.astype(np.int64)


def _as_array(row: int, prompt: ArrayLike) -> NDArray[Any]:
    """A prompt as an array; of Python's own integers where one is larger than NumPy's."""
    try:
        ids = np.asarray(prompt)
    except ValueError as error:
        raise TypeError(f"prompt {row} holds lists of different lengths, expected token ids") from error
    if ids.dtype.kind == "O":
        for token in ids.flat:
            if not isinstance(token, int):
                raise TypeError(f"prompt {row} holds {token!r}, expected token ids")
    return ids


def _check_past(past_length: Sequence[int] | None, prompts: Sequence[Ids]) -> Ids:
    if past_length is None:
        return np.zeros(len(prompts), np.int64)
    for row, (past, prompt) in enumerate(zip(past_length, prompts, strict=True)):
        if not 0 <= past < len(prompt):
            raise ValueError(
                f"past_length[{row}] is {past}, expected 0 or more and fewer than the {len(prompt)} prompt tokens"
            )
    return np.array(past_length, np.int64)


def _room(row: int, prompt: Ids, max_new_tokens: int | None, limit: int) -> int:
    """How many tokens a row may gain."""
    new = 1 if max_new_tokens is None else max_new_tokens
    if len(prompt) + new > limit:
        raise ValueError(
            f"row {row}: {len(prompt)} prompt tokens and {new} new ones make {len(prompt) + new}, "
            f"the cache allows {limit}; shorten the prompt or ask for fewer"
        )
    return limit - len(prompt) if max_new_tokens is None else max_new_tokens
