"""Which checkpoint tensor every parameter of a module is read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family
from kvgraph.models.layers import Linear

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where one parameter comes from.

    Attributes:
        name: Tensor name in the checkpoint.
        transpose: Whether the checkpoint stores it the other way round.
        shape: Its shape in the checkpoint.
    """

    name: str
    transpose: bool
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Every parameter's source, and what a checkpoint may hold beside.

    Attributes:
        sources: Parameter name -> source.
        dropped: Checkpoint names that are known and not used.
        tied: Checkpoint name -> parameter whose values it must repeat where it is present.
    """

    sources: Mapping[str, WeightSource]
    dropped: frozenset[str]
    tied: Mapping[str, str]

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint name -> shape of everything that must be there."""
        return {source.name: source.shape for source in self.sources.values()}


def plan_weights(family: Family, decoder: Decoder) -> WeightPlan:
    """Match a family's name map with the parameters that a module really has.

    A name whose parameter the module lacks (a bias that the config rules out) is left out of the plan, so that a
    checkpoint that holds it is refused.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    flipped = {f"{name}.weight" for name, module in decoder.named_modules() if isinstance(module, Linear)}
    sources: dict[str, WeightSource] = {}
    dropped: set[str] = set()
    for source, parameter in _expanded(family.weight_names, len(decoder.layer_kinds)):
        if parameter is None:
            dropped.add(source)
        elif parameter in shapes:
            shape, transpose = shapes[parameter], parameter in flipped
            sources[parameter] = WeightSource(source, transpose, shape[::-1] if transpose else shape)
    unset = shapes.keys() - sources.keys()
    assert not unset, f"{family.model_type}: no weight name for {sorted(unset)[:3]}"
    tied = {source: EMBEDDING for source, parameter in family.weight_names.items() if parameter == LM_HEAD}
    return WeightPlan(sources, frozenset(dropped), tied if decoder.lm_head is None else {})


def _expanded(names: Mapping[str, str | None], num_layers: int) -> list[tuple[str, str | None]]:
    """The map with "{i}" replaced by every layer's number."""
    pairs: list[tuple[str, str | None]] = []
    for source, parameter in names.items():
        for layer in range(num_layers if "{i}" in source else 1):
            number = str(layer)
            pairs.append((source.replace("{i}", number), parameter and parameter.replace("{i}", number)))
    return pairs


def parameter_dtypes(module: nn.Module) -> dict[str, str]:
    """Parameter name -> dtype name ("float16")."""
    return {
        name: str(parameter.dtype).removeprefix("torch.") for name, parameter in module.named_parameters()
    }
