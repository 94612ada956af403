"""Which checkpoint tensors every parameter of a module is read from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from kvgraph.models.encoder_decoder import Model
from kvgraph.models.family import Family, Into, Part
from kvgraph.models.layers import Linear

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where one parameter comes from.

    Attributes:
        names: Tensors of the checkpoint; several are stacked along a new first axis.
        ranges: What to take of each along `axis`, as (start, stop); () takes all.
        axis: 0 or 1, before transposing.
        transpose: Whether the checkpoint stores it the other way round.
        add: Added to every value.
    """

    names: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    axis: int
    transpose: bool
    add: float


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Every parameter's source, and what a checkpoint may hold beside.

    Attributes:
        sources: Parameter name -> source.
        shapes: Checkpoint name -> shape of everything that must be there.
        dropped: Checkpoint names that are known and not used.
        tied: Checkpoint name -> checkpoint name whose values it must repeat where it is present.
    """

    sources: Mapping[str, WeightSource]
    shapes: Mapping[str, tuple[int, ...]]
    dropped: frozenset[str]
    tied: Mapping[str, str]

    @property
    def ignorable(self) -> frozenset[str]:
        """Checkpoint names that may be present or absent."""
        return self.dropped | self.tied.keys()


def plan_weights(family: Family, model: Model, present: Collection[str] = ()) -> WeightPlan:
    """Match a family's name map with the parameters that a module really has.

    A name whose parameter the module lacks (a bias that the config rules out) is left out of the plan, so that a
    checkpoint that holds it is refused.

    Args:
        family: The architecture.
        model: Its module.
        present: Names in the checkpoint, which tell whether it has the family's `base_prefix`.
    """
    parameters, graph_names = model.weights(), model.names()
    modules = model.named_modules()
    linear = {graph_names[f"{name}.weight"] for name, module in modules if isinstance(module, Linear)}
    names = family.weight_names(model.config)
    prefix = family.base_prefix
    if present and not any(name.startswith(prefix) for name in present):
        names = {name.removeprefix(prefix): into for name, into in names.items()}
    names, tied = _without_copies(names, present)
    sources: dict[str, WeightSource] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dropped = {name for name in present if family.left_out and name.startswith(family.left_out)}
    for pattern, parts in _expanded(names, model.layer_counts):
        if not parts:
            dropped.add(pattern)
        for part in parts:
            if part.parameter not in parameters:
                continue
            shape = tuple(parameters[part.parameter].shape)
            experts = range(shape[0]) if "{e}" in pattern else range(1)
            tensors = tuple(pattern.replace("{e}", str(expert)) for expert in experts)
            transpose = part.parameter in linear if part.transpose is None else part.transpose
            sources[part.parameter] = WeightSource(tensors, part.ranges, part.axis, transpose, part.add)
            single = shape[1:] if "{e}" in pattern else shape
            stored = single[::-1] if transpose else single
            shapes.update({name: _joined(shapes.get(name), stored, part.axis) for name in tensors})
    unset = parameters.keys() - sources.keys()
    assert not unset, f"{family.model_type}: no weight name for {sorted(unset)[:3]}"
    if model.head.lm_head is None:
        (embedding,) = sources[EMBEDDING].names
        tied |= {source: embedding for source, into in names.items() if into == LM_HEAD}
    return WeightPlan(sources, shapes, frozenset(dropped), tied)


def _without_copies(
    names: Mapping[str, Into], present: Collection[str]
) -> tuple[dict[str, Into], dict[str, str]]:
    """One name for each parameter that goes by several, the first that is present; and the others -> that name."""
    by_parameter: dict[str, list[str]] = {}
    for name, into in names.items():
        if isinstance(into, str):
            by_parameter.setdefault(into, []).append(name)
    copies: dict[str, str] = {}
    for same in by_parameter.values():
        original = next((name for name in same if name in present), same[0])
        copies.update({name: original for name in same if name != original})
    return {name: into for name, into in names.items() if name not in copies}, copies


def _expanded(
    names: Mapping[str, Into], layer_counts: Mapping[str, int]
) -> Iterator[tuple[str, tuple[Part, ...]]]:
    """The map with "{i}" and "{j}" replaced by every layer's number; () for what is dropped."""
    for pattern, into in names.items():
        letter = next((letter for letter in layer_counts if letter in pattern), "{i}")
        for layer in map(str, range(layer_counts[letter] if letter in pattern else 1)):
            parts = (
                (Part(into),) if isinstance(into, str) else (into,) if isinstance(into, Part) else into or ()
            )
            numbered = (replace(part, parameter=part.parameter.replace(letter, layer)) for part in parts)
            yield pattern.replace(letter, layer), tuple(numbered)


def _joined(seen: tuple[int, ...] | None, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """Shape of a tensor that holds a part of `shape` beside those seen so far, along `axis`."""
    if seen is None:
        return shape
    return (*shape[:axis], seen[axis] + shape[axis], *shape[axis + 1 :])
