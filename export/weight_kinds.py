"""A model's weights, sorted into its parts and grouped by kind: what `kvgraph inspect` counts.

This module imports neither torch nor onnx: the weights of a bundle are counted without them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

# In the order of a model. "other" holds what none of the rules knows, so that the parts always add up.
PARTS = ("embedding", "attention", "ffn", "norms", "head", "other")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_PART_OF_MODULE = {
    "embed_tokens": "embedding",
    "embed_positions": "embedding",
    "relative_attention_bias": "attention",
    "self_attn": "attention",
    "cross_attn": "attention",
    "mlp": "ffn",
    "lm_head": "head",
}


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor.

    Attributes:
        name: As the checkpoint or the bundle spells it.
        part: One of `PARTS`.
        dtype: "float16".
        shape: As it is stored.
        is_parameter: False for scales, zero points and second copies, whose bytes alone count.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    is_parameter: bool = True


@dataclass(frozen=True, slots=True)
class WeightKind:
    """Weights that differ in nothing but their layer or expert.

    Attributes:
        name: Their common name, see `layer_pattern`.
        part: One of `PARTS`.
        dtype: Of each.
        shape: Of each.
        count: How many there are.
        parameters: Elements of all that are parameters.
        nbytes: Bytes of all.
    """

    name: str
    part: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PartSize:
    """One part of a model.

    Attributes:
        name: One of `PARTS`.
        parameters: Elements of its weights.
        share: Of the whole model's, 0 to 1.
        nbytes: Bytes of its weights.
    """

    name: str
    parameters: int
    share: float
    nbytes: int


def part_of(parameter: str) -> str:
    """The part that a parameter belongs to, by its name in the model: `model.layers.0.mlp.up_proj.weight` -> ffn."""
    modules = parameter.split(".")[:-1]
    # Norms inside an attention block are norms.
    if modules and "norm" in modules[-1]:
        return "norms"
    return next((_PART_OF_MODULE[module] for module in modules if module in _PART_OF_MODULE), "other")


def element_bits(dtype: str) -> int:
    """Bits of an element, which ONNX-style names carry: "bfloat16" -> 16, "float8_e4m3fn" -> 8, "int4" -> 4.

    Raises:
        ValueError: The name carries none.
    """
    found = re.match(r"(?:bfloat|float|uint|int)(\d+)", dtype)
    if found is None:
        raise ValueError(
            f"dtype {dtype!r} does not say how wide it is, expected a name such as float16 or int4"
        )
    return int(found[1])


def tensor_bytes(dtype: str, elements: int) -> int:
    """Bytes of a tensor; elements narrower than a byte are packed."""
    return (elements * element_bits(dtype) + 7) // 8


def group_weights(weights: Iterable[Weight]) -> tuple[WeightKind, ...]:
    """The kinds of weights, in the order in which they first come."""
    groups: dict[tuple[str, str, str, tuple[int, ...], bool], int] = {}
    for weight in weights:
        kind = (layer_pattern(weight.name), weight.part, weight.dtype, weight.shape, weight.is_parameter)
        groups[kind] = groups.get(kind, 0) + 1
    kinds = []
    for (name, part, dtype, shape, is_parameter), count in groups.items():
        elements = math.prod(shape)
        nbytes = count * tensor_bytes(dtype, elements)
        parameters = count * elements if is_parameter else 0
        kinds.append(WeightKind(name, part, dtype, shape, count, parameters, nbytes))
    return tuple(kinds)


def size_parts(kinds: Iterable[WeightKind]) -> tuple[PartSize, ...]:
    """Size of each part; "other" only where there is something in it."""
    kinds = tuple(kinds)
    total = sum(kind.parameters for kind in kinds)
    sizes = []
    for part in PARTS:
        members = [kind for kind in kinds if kind.part == part]
        parameters = sum(kind.parameters for kind in members)
        if members or part != "other":
            nbytes = sum(kind.nbytes for kind in members)
            sizes.append(PartSize(part, parameters, parameters / total if total else 0.0, nbytes))
    return tuple(sizes)


def layer_pattern(name: str) -> str:
    """A name with "{i}" for its layer, and "{e}" for the expert behind it: `present.3.key` -> `present.{i}.key`."""
    name = _NUMBER.sub("{i}", name, count=1)
    return _NUMBER.sub("{e}", name)
