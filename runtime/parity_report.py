"""What a comparison of two sessions found: plain data, as JSON and as text."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from kvgraph.export.contract import GraphName
from kvgraph.float16_range import Float16Overflow
from kvgraph.runtime.parity_bands import Band
from kvgraph.runtime.parity_metrics import LogitErrors, TensorError
from kvgraph.runtime.session import SessionInfo


@dataclass(frozen=True, slots=True)
class StepReport:
    """One call of both sessions.

    Attributes:
        step: Number of the call.
        graph: Which graph ran.
        position: Position of the first new token, in the longest row.
        tokens: Tokens whose logits were compared, over all rows.
        logits: Their errors.
        logits_tolerance: Largest error of a logit that is in band.
        cache: Error of each layer's keys and values, over the slots in use; empty where they cannot be compared.
        hidden: Error of the residual stream before each layer and after the last; empty unless asked for.
    """

    step: int
    graph: GraphName
    position: int
    tokens: int
    logits: LogitErrors
    logits_tolerance: float
    cache: tuple[TensorError, ...]
    hidden: tuple[TensorError, ...]

    @property
    def in_band(self) -> bool:
        """Whether every error is within its tolerance and no clear choice of token differs."""
        tensors = all(error.in_band for error in (*self.cache, *self.hidden))
        return self.logits.max_abs <= self.logits_tolerance and self.logits.differ == 0 and tensors

    @property
    def first_layer(self) -> int | None:
        """First layer whose cache is out of band."""
        return _first_out(self.cache)

    @property
    def first_hidden(self) -> int | None:
        """First residual out of band: 0 is the embedding, i + 1 what leaves layer i."""
        return _first_out(self.hidden)


@dataclass(frozen=True, slots=True)
class Totals:
    """A report's steps in one line.

    Attributes:
        steps: Calls.
        tokens: Tokens whose logits were compared.
        logits: Worst of each error, means over all tokens, sums of the counts.
        cache: Largest error of each layer's cache.
        hidden: Largest error of each residual.
    """

    steps: int
    tokens: int
    logits: LogitErrors
    cache: tuple[float, ...]
    hidden: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ParityReport:
    """A teacher-forced comparison of a candidate with a reference.

    Attributes:
        reference: What the reference ran on.
        candidate: What the candidate ran on.
        band: Which errors are accepted.
        steps: Every call, in order.
        cross: Error of each layer's keys and values of the sources; empty without an encoder.
        overflow: Where the reference's residual stream is more than the candidate's float16 holds; None where it
            never is, or was not measured.
    """

    reference: SessionInfo
    candidate: SessionInfo
    band: Band
    steps: tuple[StepReport, ...]
    cross: tuple[TensorError, ...] = ()
    overflow: Float16Overflow | None = None

    @property
    def in_band(self) -> bool:
        """Whether every step is, and what the encoder gives; never where the residual stream overflows."""
        tensors = all(step.in_band for step in self.steps) and all(error.in_band for error in self.cross)
        return tensors and self.overflow is None

    @property
    def first_out(self) -> StepReport | None:
        """First step out of band."""
        return next((step for step in self.steps if not step.in_band), None)

    @property
    def worst(self) -> StepReport:
        """The step with the largest error of a logit; one without a number is worse than any."""
        return max(self.steps, key=lambda step: _order(step.logits.max_abs))

    @property
    def totals(self) -> Totals:
        """All steps together."""
        logits = [step.logits for step in self.steps]
        tokens = sum(step.tokens for step in self.steps)
        worst = LogitErrors(
            max_abs=_largest([errors.max_abs for errors in logits]),
            mean_abs=sum(step.logits.mean_abs * step.tokens for step in self.steps) / tokens,
            cosine=-_largest([-errors.cosine for errors in logits]),
            kl=_largest([errors.kl for errors in logits]),
            kl_mean=sum(step.logits.kl_mean * step.tokens for step in self.steps) / tokens,
            agree=sum(errors.agree for errors in logits),
            ambiguous=sum(errors.ambiguous for errors in logits),
            differ=sum(errors.differ for errors in logits),
        )
        return Totals(
            steps=len(self.steps),
            tokens=tokens,
            logits=worst,
            cache=_largest_by_place([step.cache for step in self.steps]),
            hidden=_largest_by_place([step.hidden for step in self.steps]),
        )

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values; a number that is not finite is null."""
        first = self.first_out
        content = {
            "in_band": self.in_band,
            "first_step_out_of_band": None if first is None else first.step,
            "first_layer_out_of_band": None if first is None else first.first_layer,
            "first_hidden_state_out_of_band": None if first is None else first.first_hidden,
            "totals": asdict(self.totals),
            **asdict(self),
        }
        plain: dict[str, Any] = _plain(content)
        return plain


def hidden_name(index: int) -> str:
    """A residual in words."""
    return "the embedding" if index == 0 else f"layer {index - 1}"


def _first_out(errors: tuple[TensorError, ...]) -> int | None:
    return next((index for index, error in enumerate(errors) if not error.in_band), None)


def _order(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _largest(values: list[float]) -> float:
    """The largest value, NaN if there is one."""
    return math.nan if any(math.isnan(value) for value in values) else max(values)


def _largest_by_place(rows: list[tuple[TensorError, ...]]) -> tuple[float, ...]:
    return tuple(_largest([error.max_abs for error in place]) for place in zip(*rows, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
