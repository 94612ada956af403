"""The error of every quantized weight as a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgraph.export.bundle import Bundle
from kvgraph.export.weight_kinds import layer_pattern
from kvgraph.quant.report import describe_weight

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def plot_quantization(bundle: Bundle, path: str | Path) -> None:
    """Write signal to noise, and the range of the scales, of every module by layer as PNG.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: The bundle is a float one.
    """
    # The object interface alone: no window, and no state left behind in the process.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if bundle.quantization is None:
        raise ValueError(f"{bundle.path}: is not quantized")
    lines = _lines(bundle.quantization["modules"])
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    errors, scales = figure.subplots(2, 1, sharex=True)
    for index, (label, modules) in enumerate(lines.items()):
        style = {"color": f"C{index % 10}", "marker": "o" if index < 10 else "s", "markersize": 3}
        layers = list(modules)
        ratios = [modules[layer]["snr_db"] or math.nan for layer in layers]
        errors.plot(layers, ratios, label=label, **style)
        ranges = [modules[layer]["scale_range"] for layer in layers]
        scales.plot(layers, [median for _, median, _ in ranges], **style)
        scales.fill_between(
            layers,
            [low for low, _, _ in ranges],
            [high for _, _, high in ranges],
            color=style["color"],
            alpha=0.12,
        )
    errors.set_ylabel("signal to noise of the weight, dB")
    errors.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    scales.set_ylabel("scales: median, least to largest")
    scales.set_yscale("log")
    scales.set_xlabel("layer (left of 0: outside of the layers)")
    scales.xaxis.get_major_locator().set_params(integer=True)
    for axis in (errors, scales):
        axis.grid(alpha=0.3)
    figure.suptitle(_title(bundle), x=0.01, ha="left")
    figure.savefig(path, format="png", dpi=120)


def _lines(modules: list[Mapping[str, Any]]) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Kind of module -> layer -> the module; -1 where there is no layer."""
    lines: dict[str, dict[int, Mapping[str, Any]]] = {}
    for module in modules:
        name = module["module"]
        found = _LAYER.search(name)
        kind = layer_pattern(name).removeprefix("model.layers.{i}.")
        label = f"{kind} ({describe_weight(module['weight'])})"
        if len(module["graphs"]) == 1:
            label = f"{module['graphs'][0]}: {label}"
        lines.setdefault(label, {})[-1 if found is None else int(found[0])] = module
    return lines


def _title(bundle: Bundle) -> str:
    assert bundle.recipe is not None
    recipes = " / ".join(dict.fromkeys(recipe["name"] for recipe in bundle.recipe.values()))
    return f"{bundle.path.name}: {bundle.model_type}, {recipes}"
