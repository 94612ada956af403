"""A parity report as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraph.runtime.parity_metrics import LogitErrors, TensorError
from kvgraph.runtime.parity_report import ParityReport, StepReport, hidden_name
from kvgraph.runtime.session import SessionInfo
from kvgraph.table import format_table

_ROWS = 12
_HEADINGS = (
    "step",
    "graph",
    "position",
    "tokens",
    "max error",
    "mean error",
    "cosine",
    "KL",
    "top-1",
    "cache",
)
_ALIGN = "rlrrrrrrlrl"


def format_report(report: ParityReport) -> str:
    """The sessions, the band, a table of chosen steps, the layers and the verdict, in lines."""
    band = report.band
    accepted = f"{band.absolute:g}, or {band.relative:g} of the tensor's largest value"
    lines = [
        f"reference  {_session(report.reference)}",
        f"candidate  {_session(report.candidate)}",
        f"band       {band.name}: error up to {accepted} ({band.reason})",
        *_overflow_lines(report),
        "",
        format_table([_HEADINGS, *(_row(step) for step in _chosen(report)), _total_row(report)], _ALIGN),
        "",
        *_layer_lines(report),
        *_source_lines(report),
        verdict(report),
    ]
    return "\n".join(lines)


def verdict(report: ParityReport) -> str:
    """One line: in band or not, and where it was left first."""
    totals, first = report.totals, report.first_out
    logits = totals.logits
    errors = f"max error {logits.max_abs:.2g}, KL {logits.kl:.2g}, top-1 {_top1(logits)}"
    if first is None:
        return f"{_state(report)}: {totals.steps} steps, {totals.tokens} tokens, {errors}"
    out = sum(not step.in_band for step in report.steps)
    place = f"first step {first.step} ({first.graph}, position {first.position})"
    if first.first_layer is not None:
        place += f", first cache layer {first.first_layer}"
    elif first.cache:
        place += ", caches in band"
    if first.first_hidden is not None:
        place += f", first hidden state {hidden_name(first.first_hidden)}"
    return f"OUT OF BAND: {out} of {totals.steps} steps; {place}; {errors}"


def _state(report: ParityReport) -> str:
    """The verdict on a report whose steps are all in band."""
    if report.overflow is not None:
        return f"OUT OF FLOAT16'S RANGE from {report.overflow.place} on"
    return "in band" if report.in_band else "OUT OF BAND in what the encoder gives"


def _overflow_lines(report: ParityReport) -> list[str]:
    """Where the residual stream overflows, and the cure."""
    if report.overflow is None:
        return []
    return [f"overflow   {report.overflow.describe()}"]


def _source_lines(report: ParityReport) -> list[str]:
    """What the encoder gives, in one line."""
    if not report.cross:
        return []
    out = [str(layer) for layer, error in enumerate(report.cross) if not error.in_band]
    state = f"OUT OF BAND in layers {', '.join(out)}" if out else "in band"
    return [
        f"sources: max error {max(error.max_abs for error in report.cross):.2g} of cross tensors, {state}",
        "",
    ]


def _session(info: SessionInfo) -> str:
    return f"{info.title}: {info.subject}"


def _chosen(report: ParityReport) -> list[StepReport]:
    """At most `_ROWS` steps: the first, the last, the worst, the first out of band, and some between."""
    steps = report.steps
    first_out = report.first_out
    marked = {0, len(steps) - 1, report.worst.step, *([first_out.step] if first_out else [])}
    spread = max(_ROWS - len(marked), 1)
    marked |= {round(at * (len(steps) - 1) / (spread + 1)) for at in range(1, spread + 1)}
    return [steps[index] for index in sorted(marked)]


def _row(step: StepReport) -> tuple[str, ...]:
    mark = "" if step.in_band else "OUT"
    place = (str(step.step), step.graph, str(step.position), str(step.tokens))
    return (*place, *_errors(step.logits), _cache([error.max_abs for error in step.cache]), mark)


def _total_row(report: ParityReport) -> tuple[str, ...]:
    totals = report.totals
    return ("all", "", "", str(totals.tokens), *_errors(totals.logits), _cache(totals.cache))


def _errors(errors: LogitErrors) -> tuple[str, ...]:
    numbers = (f"{errors.max_abs:.2e}", f"{errors.mean_abs:.2e}", f"{errors.cosine:.7f}", f"{errors.kl:.2e}")
    return (*numbers, _top1(errors))


def _top1(errors: LogitErrors) -> str:
    """As "62/64", with near-ties and clear differences named where there are any."""
    text = f"{errors.agree}/{errors.agree + errors.ambiguous + errors.differ}"
    if errors.ambiguous:
        text += f" {errors.ambiguous} AMBIGUOUS"
    if errors.differ:
        text += f" {errors.differ} DIFFER"
    return text


def _cache(errors: Sequence[float]) -> str:
    return f"{max(errors):.2e}" if errors else "-"


def _layer_lines(report: ParityReport) -> list[str]:
    """The worst cache, or with hidden states every layer's cache and residual."""
    caches = _worst_by_place([step.cache for step in report.steps])
    hidden = _worst_by_place([step.hidden for step in report.steps])
    if hidden:
        headings = ("hidden state after", "error", "of its band", "cache error", "of its band")
        rows = [
            (
                hidden_name(index),
                *_shares(error),
                *(_shares(caches[index - 1]) if caches and index else ("", "")),
            )
            for index, error in enumerate(hidden)
        ]
        return [format_table([headings, *rows], "lrrrr"), ""]
    if not caches:
        return ["caches not compared: a quantized cache holds codes, not values", ""]
    worst = max(range(len(caches)), key=lambda layer: caches[layer].share)
    error, share = _shares(caches[worst])
    return [f"worst cache: layer {worst}, error {error}, {share} of its band", ""]


def _worst_by_place(rows: Sequence[tuple[TensorError, ...]]) -> list[TensorError]:
    return [max(place, key=lambda error: error.share) for place in zip(*rows, strict=True)]


def _shares(error: TensorError) -> tuple[str, str]:
    return f"{error.max_abs:.2e}", f"{error.share:.3f}"
