"""What quantization did and what it cost, as text: from `Bundle.quantization`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.weight_kinds import layer_pattern
from kvgraph.table import format_table

_MODULE_HEADINGS = ("module", "graphs", "weight", "input", "count", "least SNR", "largest error", "MB")
_MODULE_ALIGN = "llllrrrr"
_EXPLAINED_HEADINGS = ("module", "graphs", "weight", "input", "scales", "SNR", "largest error", "MB")
_EXPLAINED_ALIGN = "lllllrrr"


def format_quantization(bundle: Bundle, explain: bool = False) -> str:
    """Tables of what was quantized and what was left, and figures of what it cost.

    Args:
        bundle: From `quantize_bundle`.
        explain: Show every module, with its scales, and not one line for all layers.

    Raises:
        ValueError: The bundle is a float one.
    """
    found = bundle.quantization
    if found is None:
        raise ValueError(f"{bundle.path}: is not quantized")
    modules: Sequence[Mapping[str, Any]] = found["modules"]
    if explain:
        rows = [_explained(module) for module in modules]
        table = format_table([_EXPLAINED_HEADINGS, *rows], _EXPLAINED_ALIGN)
    else:
        table = format_table([_MODULE_HEADINGS, *_grouped(modules)], _MODULE_ALIGN)
    figures = format_table([*_cache(bundle), *_figures(found)], "ll")
    # Of a model whose cache alone is quantized there is nothing to say module by module.
    sections = [table, format_table(_left(found["left"]), "ll"), figures] if modules else [figures]
    return "\n\n".join(section for section in sections if section)


def describe_weight(scheme: Mapping[str, Any]) -> str:
    """A weight's scheme in words: "int4 block 32"."""
    words = [scheme["format"]]
    words.append("channel" if scheme["block_size"] is None else f"block {scheme['block_size']}")
    if scheme["scale_form"] != "float":
        words.append(f"{scheme['scale_form']} scales")
    return " ".join(words)


def _grouped(modules: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row for modules that differ in nothing but their layer."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for module in modules:
        groups.setdefault((layer_pattern(module["module"]), *_how(module)), []).append(module)
    return [
        (
            *key,
            str(len(members)),
            _decibels(min(_snr(member) for member in members)),
            f"{max(member['largest_error'] for member in members):.2e}",
            f"{sum(member['nbytes'] for member in members) / 1e6:.2f}",
        )
        for key, members in groups.items()
    ]


def _explained(module: Mapping[str, Any]) -> tuple[str, ...]:
    least, median, most = module["scale_range"]
    return (
        module["module"],
        *_how(module),
        f"{least:.2e} {median:.2e} {most:.2e}",
        _decibels(_snr(module)),
        f"{module['largest_error']:.2e}",
        f"{module['nbytes'] / 1e6:.2f}",
    )


def _how(module: Mapping[str, Any]) -> tuple[str, str, str]:
    inputs = {f"{how['format']} {how['granularity']}" for how in module["activations"].values()}
    graphs = "both" if len(module["graphs"]) == len(GRAPHS) else ", ".join(module["graphs"])
    return graphs, describe_weight(module["weight"]), " / ".join(sorted(inputs)) or "float"


def _left(left: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    """What stays float, and why; the graph only where the other one quantizes it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for graph, reasons in left.items():
        for name, reason in reasons.items():
            rows.setdefault((name, reason), []).append(graph)
    return [
        (f"left float: {name}", reason if len(graphs) == len(GRAPHS) else f"{reason} ({', '.join(graphs)})")
        for (name, reason), graphs in rows.items()
    ]


def _cache(bundle: Bundle) -> list[tuple[str, str]]:
    """How the cache is quantized, if it is; both graphs have the same recipe for it."""
    scheme = None if bundle.recipe is None else bundle.recipe[GRAPHS[0]]["kv_cache"]
    return (
        [] if scheme is None else [("cache", f"{scheme['format']}, a scale for each {scheme['granularity']}")]
    )


def _figures(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    before, after = found["size"]["float"], found["size"]["quantized"]
    rows = [("weights", f"{before / 1e6:.2f} MB -> {after / 1e6:.2f} MB ({after / before:.1%})")]
    if (worst := found["worst_module"]) is not None:
        graphs = "" if len(worst["graphs"]) == len(GRAPHS) else f" ({worst['graphs'][0]})"
        noise = _decibels(_snr(worst))
        rows.append(("worst module", f"{worst['module']}{graphs}, signal to noise {noise}"))
    evaluation = found.get("evaluation")
    if evaluation is None:
        return rows
    old, new = _or_nan(evaluation["reference_perplexity"]), _or_nan(evaluation["perplexity"])
    how = f"{evaluation['tokens']} tokens of {evaluation['text']}"
    if evaluation["prefill"] < evaluation["window"]:
        how += f", {evaluation['prefill']} of every {evaluation['window']} through prefill, the rest through decode"
    rows += [
        ("perplexity", f"{old:.4g} -> {new:.4g} ({new / old - 1:+.2%}) over {how}"),
        (
            "KL divergence",
            f"mean {_or_nan(evaluation['kl_mean']):.2e}, largest {_or_nan(evaluation['kl_max']):.2e}",
        ),
        ("top-1 agreement", f"{_or_nan(evaluation['top1_agreement']):.2%}"),
    ]
    return rows


def _snr(module: Mapping[str, Any]) -> float:
    return math.inf if module["snr_db"] is None else float(module["snr_db"])


def _decibels(value: float) -> str:
    return "exact" if math.isinf(value) else f"{value:.1f} dB"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
