"""Which option of every module to take within a budget of bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a module.

    Attributes:
        bits: Of a weight, its share of scales and zero points included.
        divergence: What this does to the model when all else stays exact.
    """

    bits: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A module and what may become of it.

    Attributes:
        parameters: Weights of the module.
        options: In any order.
    """

    parameters: int
    options: Sequence[Option]


def spend_bits(choices: Sequence[Choice], mean_bits: float) -> list[int]:
    """The option of each module, with little divergence in all and at most `mean_bits` a weight on average.

    From the cheapest options on, the step that saves most divergence for a bit is taken while it fits. Only options on
    the lower convex hull of (bits, divergence) are steps, so that no step hides a better one behind it.

    Raises:
        ValueError: Even the cheapest options take more.
    """
    hulls = [_lower_hull(choice.options) for choice in choices]
    total = sum(choice.parameters for choice in choices)
    taken = [hull[0] for hull in hulls]
    spent = sum(
        choice.parameters * choice.options[index].bits for choice, index in zip(choices, taken, strict=True)
    )
    if spent > mean_bits * total:
        raise ValueError(
            f"{mean_bits:g} bits a weight are too few: the recipe's own schemes take {spent / total:.3g}; "
            "raise --auto or choose a recipe of fewer bits"
        )
    steps = []
    for module, (choice, hull) in enumerate(zip(choices, hulls, strict=True)):
        for before, after in itertools.pairwise(hull):
            old, new = choice.options[before], choice.options[after]
            cost = (new.bits - old.bits) * choice.parameters
            steps.append(((old.divergence - new.divergence) / cost, cost, module, before, after))
    for _, cost, module, before, after in sorted(steps, reverse=True):
        if taken[module] == before and spent + cost <= mean_bits * total:
            taken[module], spent = after, spent + cost
    return taken


def _lower_hull(options: Sequence[Option]) -> list[int]:
    """Options by rising bits, each of which saves less divergence for a bit than the one before."""
    order = sorted(range(len(options)), key=lambda index: (options[index].bits, options[index].divergence))
    hull: list[int] = []
    for index in order:
        if hull and options[index].divergence >= options[hull[-1]].divergence:
            continue
        while len(hull) > 1 and _slope(options, hull[-2], hull[-1]) <= _slope(options, hull[-2], index):
            hull.pop()
        hull.append(index)
    return hull


def _slope(options: Sequence[Option], first: int, second: int) -> float:
    """Divergence saved for a bit."""
    old, new = options[first], options[second]
    return (old.divergence - new.divergence) / (new.bits - old.bits)
