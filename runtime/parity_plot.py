"""A parity report as a picture: the error of the logits by step, and of every layer by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.parity_metrics import TensorError
from kvgraph.runtime.parity_report import ParityReport, StepReport

# Colours run from this share of the band to all of it; what is less is white, what is more red.
_LEAST_SHARE = 1e-4
# A line through so few steps is hard to see without its points.
_FEW_STEPS = 40


def plot_report(report: ParityReport, path: str | Path) -> None:
    """Write the picture of a report as PNG.

    Above, the errors of the logits and the edge of the band; below, for every layer and step, the error of the
    cache (and of the hidden states, where compared) as a share of its band.

    Raises:
        ImportError: matplotlib is not installed.
    """
    # The object interface alone: no window, and no state left behind in the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    maps = [
        (title, rows)
        for title, rows in (
            ("cache of layer", [step.cache for step in report.steps]),
            ("hidden state (0: embedding)", [step.hidden for step in report.steps]),
        )
        if rows[0]
    ]
    figure = Figure(figsize=(11, 3.6 + 3.0 * len(maps)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        1 + len(maps), 1, squeeze=False, sharex=True, height_ratios=[1.1] + [1.0] * len(maps)
    )
    figure.suptitle(_title(report), fontsize=11, x=0.01, ha="left")
    _plot_logits(axes[0, 0], report)
    image = None
    for axis, (title, rows) in zip(axes[1:, 0], maps, strict=True):
        image = _plot_layers(axis, title, rows)
    if image is not None:
        bar = figure.colorbar(image, ax=list(axes[1:, 0]), extend="both", fraction=0.025, pad=0.01)
        bar.set_label("error as a share of its band (red: out)")
    axes[-1, 0].set_xlabel("step")
    figure.savefig(path, format="png", dpi=120)


def _title(report: ParityReport) -> str:
    reference, candidate = report.reference, report.candidate
    return (
        f"{candidate.runtime} {candidate.version} on {candidate.device}, {candidate.dtype}  against  "
        f"{reference.runtime} {reference.version} on {reference.device}, {reference.dtype}:  "
        f"{'in band' if report.in_band else 'OUT OF BAND'} ({report.band.name})"
    )


def _plot_logits(axis: Any, report: ParityReport) -> None:
    steps = [step.step for step in report.steps]
    series = (
        ("max error", [step.logits.max_abs for step in report.steps], "tab:blue", "-"),
        ("mean error", [step.logits.mean_abs for step in report.steps], "tab:cyan", "-"),
        ("KL", [step.logits.kl for step in report.steps], "tab:green", ":"),
        ("band", [step.logits_tolerance for step in report.steps], "tab:red", "--"),
    )
    marker = "o" if len(steps) <= _FEW_STEPS else None
    for label, values, colour, style in series:
        axis.plot(
            steps,
            _positive(values),
            style,
            color=colour,
            label=label,
            linewidth=1.2,
            marker=marker,
            markersize=3,
        )
    out = [step for step in report.steps if not step.in_band]
    if out:
        axis.plot(
            [step.step for step in out],
            _positive([step.logits.max_abs for step in out]),
            "x",
            color="tab:red",
            label="step out of band",
        )
    _shade_prefill(axis, report.steps)
    axis.set_yscale("log")
    axis.set_ylabel("logits")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6, fontsize=8, frameon=False, borderpad=0)


def _plot_layers(axis: Any, title: str, rows: Sequence[tuple[TensorError, ...]]) -> Any:
    """A map of layers (upwards) and steps; the image, for the colour bar."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    shares = np.array([[error.share for error in row] for row in rows]).T
    colours = colormaps["viridis"].with_extremes(bad="white", under="white", over="red")
    steps, places = np.arange(shares.shape[1] + 1) - 0.5, np.arange(shares.shape[0] + 1) - 0.5
    # Infinity stands for no number; the colour scale needs a finite one.
    image = axis.pcolormesh(
        steps,
        places,
        np.nan_to_num(shares, posinf=np.finfo(np.float64).max),
        cmap=colours,
        norm=LogNorm(_LEAST_SHARE, 1.0),
        rasterized=True,
    )
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.set_ylabel(title)
    return image


def _shade_prefill(axis: Any, steps: Sequence[StepReport]) -> None:
    last = max(step.step for step in steps if step.graph == "prefill")
    axis.axvspan(-0.5, last + 0.5, color="0.9", zorder=0, label="prefill")


def _positive(values: Sequence[float]) -> NDArray[np.float64]:
    """Values for a logarithmic axis, which has no place for zero."""
    array = np.asarray(values, np.float64)
    return np.where(array > 0, array, np.nan)
