"""What goes into a generation and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, Unpack

from kvgraph.runtime.sampling import Logprob, SamplingParams
from kvgraph.runtime.token_rules import TokenRules

FinishReason = Literal["eos", "stop", "length"]
EarlyStopping = bool | Literal["never"]


class Options(TypedDict, total=False):
    """Keyword arguments of `Model.generate` and `Model.stream`; each may be left out, its default is in brackets.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it (0).
        top_k: Draw from the k likeliest tokens; 0: from all (0).
        top_p: Draw from the fewest tokens whose probabilities reach p (1).
        min_p: Draw from tokens at least min_p times as likely as the likeliest (0).
        repetition_penalty: Above 1, tokens of the prompt and the text so far become less likely (1).
        seed: Draws the same tokens each time: row i with seed + i, or with the i-th of several seeds (None).
        max_new_tokens: Most tokens a row; None goes on until the cache is full (None).
        eos_token_ids: Tokens of which any ends a row; None takes the model's (None).
        stop: A text, or several of which any, that ends a row and is no part of it (none).
        logprobs: Give log-probabilities of the chosen token and of so many of the likeliest (None).
        prefill_chunk: Most prompt tokens in one call of the session; None feeds a prompt at once (None).
        num_beams: Continuations of a prompt that compete; 1 is no beam search (1).
        length_penalty: With beams, above 0: longer texts gain (1).
        early_stopping: With beams, when a row ends that has `num_beams` finished texts: True at once, False when no
            beam looks better, "never" when none can become better (False).

    `kvgraph.runtime.generation.GenerationParams` and `kvgraph.runtime.sampling.SamplingParams` have the details.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int | Sequence[int] | None
    max_new_tokens: int | None
    eos_token_ids: Sequence[int] | None
    stop: str | Sequence[str]
    logprobs: int | None
    prefill_chunk: int | None
    num_beams: int
    length_penalty: float
    early_stopping: EarlyStopping


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """How far to generate, and how.

    Attributes:
        sampling: How a token is chosen.
        max_new_tokens: Most tokens a row; None goes on until the cache is full.
        eos_token_ids: Tokens of which any ends a row; None takes the tokenizer's.
        stop: A text, or several of which any, that ends a row wherever tokens begin and end. It is not part of the
            result.
        logprobs: Log-probabilities of the chosen token and of so many of the likeliest; None for none at all.
        prefill_chunk: Most prompt tokens in one call of the session; None feeds a prompt at once.
        num_beams: Continuations of a prompt that compete; 1 is no beam search.
        length_penalty: With beams, the sum of a text's log-probabilities is divided by its length to this power:
            above 0 longer texts gain, below 0 shorter ones.
        early_stopping: With beams, when a row ends that has `num_beams` finished texts. True: at once; False: when
            none of the beams, with its score at its present length, is better than the worst of them; "never": the
            same, but where `length_penalty` is above 0 with the length that it may yet reach.
        rules: Tokens that the model's settings force or forbid; beams count them after log-probabilities are taken.

    Raises:
        TypeError: A field is of another type.
        ValueError: A number is out of its range, or does not go together with beams.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int | None = None
    eos_token_ids: Sequence[int] | None = None
    stop: str | Sequence[str] = ()
    logprobs: int | None = None
    prefill_chunk: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    rules: TokenRules = field(default_factory=TokenRules)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_new_tokens", self.max_new_tokens, 0),
            ("logprobs", self.logprobs, 0),
            ("prefill_chunk", self.prefill_chunk, 1),
            ("num_beams", self.num_beams, 1),
        ):
            if value is None:
                continue
            if not _is_integer(value):
                raise TypeError(f"{name} is {value!r}, expected an integer")
            if value < least:
                raise ValueError(f"{name} is {value}, expected {least} or more")
        ends = self.eos_token_ids
        if ends is not None and not _all(ends, _is_integer):
            raise TypeError(f"eos_token_ids is {ends!r}, expected a sequence of integers")
        if not isinstance(self.stop, str) and not _all(self.stop, lambda text: isinstance(text, str)):
            raise TypeError(f"stop is {self.stop!r}, expected a text or a sequence of texts")
        self._check_beams()

    def _check_beams(self) -> None:
        penalty = self.length_penalty
        if not _is_number(penalty):
            raise TypeError(f"length_penalty is {penalty!r}, expected a number")
        if not math.isfinite(penalty):
            raise ValueError(f"length_penalty is {penalty}, expected a finite number")
        if not _is_early_stopping(self.early_stopping):
            raise ValueError(f"early_stopping is {self.early_stopping!r}, expected True, False or 'never'")
        if self.num_beams == 1:
            return
        for name, given, why in (
            ("temperature", self.sampling.temperature != 0, "tokens are not drawn in beam search"),
            ("stop", len(self.stop) > 0, "beams end with eos_token_ids or max_new_tokens only"),
            ("logprobs", self.logprobs is not None, "beam search gives the score of a whole text only"),
        ):
            if given:
                raise ValueError(
                    f"{name} does not go with num_beams = {self.num_beams}: {why}; leave one of the two out"
                )

    @classmethod
    def of(cls, **options: Unpack[Options]) -> GenerationParams:
        """Parameters from the keyword arguments of `Model.generate`."""
        given: dict[str, Any] = {**options}
        if unknown := sorted(set(given) - Options.__annotations__.keys()):
            known = ", ".join(Options.__annotations__)
            raise TypeError(f"unknown options: {', '.join(unknown)}; known are {known}")
        sampling = {name: given.pop(name) for name in SamplingParams.__slots__ if name in given}
        return cls(SamplingParams(**sampling), **given)


def _is_integer(value: object) -> bool:
    """An integer of Python or NumPy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    """A real number of Python or NumPy; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_early_stopping(value: object) -> bool:
    """A truth value, which 1 and 0 are not, or "never"."""
    return isinstance(value, bool) or value == "never"


def _all(values: object, fits: Callable[[object], bool]) -> bool:
    """Whether `values` is iterable and each of them fits."""
    return isinstance(values, Iterable) and all(fits(value) for value in values)


@dataclass(frozen=True, slots=True)
class Event:
    """One step of one row.

    Attributes:
        row: Which row.
        token_id: The token; None where a row ends without one.
        text: What can be shown now. Text that may still become a stop string, or whose last character is not
            complete, comes with a later event; the texts of all events make the text of the row.
        logprob: Log-probabilities, if asked for.
        finish_reason: Set in the last event of a row. "eos": the token ends the text and is not shown; "stop": a stop
            string appeared; "length": `max_new_tokens` is reached or the cache is full.
    """

    row: int
    token_id: int | None
    text: str
    logprob: Logprob | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What was generated for one prompt.

    Attributes:
        token_ids: Every token, the one that ended the row included.
        text: Their text without special tokens and without the stop string.
        finish_reason: Why the row ended, see `Event`.
        logprobs: Log-probabilities of each token, empty if not asked for.
        score: Of a beam search: the sum of the tokens' log-probabilities over length ** length_penalty.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[Logprob, ...] = ()
    score: float | None = None


def collect(events: Iterable[Event], rows: int) -> list[Generation]:
    """The generations of a stream that runs to its end, row by row."""
    tokens: list[list[int]] = [[] for _ in range(rows)]
    texts: list[list[str]] = [[] for _ in range(rows)]
    logprobs: list[list[Logprob]] = [[] for _ in range(rows)]
    reasons: list[FinishReason] = ["length"] * rows
    for event in events:
        texts[event.row].append(event.text)
        if event.token_id is not None:
            tokens[event.row].append(event.token_id)
        if event.logprob is not None:
            logprobs[event.row].append(event.logprob)
        if event.finish_reason is not None:
            reasons[event.row] = event.finish_reason
    return [
        Generation(tuple(tokens[row]), "".join(texts[row]), reasons[row], tuple(logprobs[row]))
        for row in range(rows)
    ]
