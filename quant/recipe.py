"""Recipes: what is quantized and how, as data.

A recipe is one of the TOML files beside this module, by name, or a TOML or JSON file of the same form:

    name = "my-recipe"
    algorithm = "gptq"            # rtn (default), gptq or awq
    rotation = "hadamard"         # leave out for none; the model's function stays, see kvgraph.quant.rotation
    smooth_quant = 0.5            # alpha of SmoothQuant, or "search"
    lm_head = "keep"              # keep (default), or "linear": quantized as every other matrix
    embedding = "keep"            # keep (default), or "linear"

    [linear.weight]               # every matrix product in the layers
    format = "int4"
    block_size = 32
    clip = "mse"

    [linear.activation]           # leave out for weight-only
    format = "int8"
    granularity = "tensor"

    [kv_cache]
    format = "int8"
    granularity = "head"

    [[override]]                  # the last pattern that matches a module's name wins
    pattern = "model.layers.*.mlp.down_proj"
    keep = true                   # or a [override.weight] and [override.activation] of its own
"""

from __future__ import annotations

import fnmatch
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvgraph.quant.recipe_files import recipe_names, recipe_text
from kvgraph.quant.scheme import ActivationScheme, CacheScheme, ModuleScheme, WeightScheme

ALGORITHMS = ("rtn", "gptq", "awq")
LM_HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
Scheme = TypeVar("Scheme", WeightScheme, ActivationScheme, CacheScheme)


@dataclass(frozen=True, slots=True)
class Override:
    """Modules whose names match a pattern are quantized by another scheme, or kept float."""

    pattern: str
    scheme: ModuleScheme | None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is quantized and how; written whole into bundle.json.

    Attributes:
        name: As given or as the file says.
        linear: The matrix products of the layers; None keeps them float.
        lm_head: "linear" quantizes the head like every other matrix product.
        embedding: "linear" quantizes the embedding table, weight-only; a tied head follows it.
        overrides: Exceptions; the last whose pattern matches a module's name wins.
        algorithm: How codes are chosen: round to nearest, GPTQ, AWQ.
        smooth_quant: Alpha of SmoothQuant, "search" for each layer's best, or None.
        kv_cache: How the cache is quantized.
        rotation: "hadamard" spreads the channels of the residual stream and of values before anything else is done.
        origin: Of a recipe that a checkpoint brought: its method, and what it says of its quantization; else None.
    """

    name: str
    linear: ModuleScheme | None = None
    lm_head: Literal["keep", "linear"] = "keep"
    embedding: Literal["keep", "linear"] = "keep"
    overrides: tuple[Override, ...] = ()
    algorithm: str = "rtn"
    smooth_quant: float | Literal["search"] | None = None
    kv_cache: CacheScheme | None = None
    rotation: Literal["hadamard"] | None = None
    origin: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(
                f"recipe {self.name!r}: algorithm is {self.algorithm!r}, expected one of {', '.join(ALGORITHMS)}"
            )
        if self.rotation not in (None, "hadamard"):
            raise ValueError(
                f'recipe {self.name!r}: rotation is {self.rotation!r}, expected "hadamard" or none'
            )
        smooth = self.smooth_quant
        if not (smooth is None or smooth == "search" or (isinstance(smooth, float) and 0 <= smooth <= 1)):
            raise ValueError(f'recipe {self.name!r}: smooth_quant is {smooth!r}, expected 0 to 1 or "search"')

    def module_scheme(self, module: str) -> ModuleScheme | None:
        """How a module ("model.layers.0.mlp.up_proj") is quantized; None keeps it float."""
        found = self.linear
        if module in (LM_HEAD, EMBEDDING):
            choice = self.lm_head if module == LM_HEAD else self.embedding
            found = self.linear if choice == "linear" else None
        for override in self.overrides:
            if fnmatch.fnmatchcase(module, override.pattern):
                found = override.scheme
        if found is not None and module == EMBEDDING:
            return ModuleScheme(found.weight)
        return found

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain JSON values."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data


def load_recipe(name: str) -> Recipe:
    """A recipe by name, or from a .toml or .json file.

    Raises:
        ValueError: There is no such recipe, or the file is not one; the message names the key.
        FileNotFoundError: There is no such file.
    """
    if name in recipe_names():
        return parse_recipe(tomllib.loads(recipe_text(name)), name)
    path = Path(name)
    if path.suffix not in (".toml", ".json"):
        raise ValueError(
            f"recipe {name!r} is not known; known are {', '.join(recipe_names())}, or give a .toml or .json file"
        )
    text = path.read_text(encoding="utf-8")
    try:
        data = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not valid {path.suffix[1:].upper()} ({error})") from error
    return parse_recipe(data, path.stem)


def parse_recipe(data: Mapping[str, Any], name: str) -> Recipe:
    """A recipe from the values of its file.

    Raises:
        ValueError: A key is unknown or a value is out of its range.
    """
    values = dict(data)
    where = f"recipe {values.setdefault('name', name)!r}"
    _refuse_unknown(
        values, {*(field.name for field in fields(Recipe)), "override"} - {"overrides", "origin"}, where
    )
    linear = values.pop("linear", None)
    cache = values.pop("kv_cache", None)
    overrides = tuple(_override(entry, where) for entry in values.pop("override", ()))
    for key in ("lm_head", "embedding"):
        if values.get(key, "keep") not in ("keep", "linear"):
            raise ValueError(f'{where}: {key} is {values[key]!r}, expected "keep" or "linear"')
    return Recipe(
        **values,
        linear=None if linear is None else _module_scheme(linear, f"{where}: linear"),
        overrides=overrides,
        kv_cache=None if cache is None else _scheme(CacheScheme, cache, f"{where}: kv_cache"),
    )


def _override(entry: Mapping[str, Any], where: str) -> Override:
    where = f"{where}: override {entry.get('pattern')!r}"
    _refuse_unknown(entry, {"pattern", "keep", "weight", "activation"}, where)
    if "pattern" not in entry or ("weight" in entry) == bool(entry.get("keep")):
        raise ValueError(f"{where}: expected a pattern and either keep = true or a weight")
    schemes = {key: value for key, value in entry.items() if key in ("weight", "activation")}
    return Override(entry["pattern"], _module_scheme(schemes, where) if schemes else None)


def _module_scheme(data: Mapping[str, Any], where: str) -> ModuleScheme:
    _refuse_unknown(data, {"weight", "activation"}, where)
    if "weight" not in data:
        raise ValueError(f"{where}: weight is missing")
    activation = data.get("activation")
    return ModuleScheme(
        _scheme(WeightScheme, data["weight"], f"{where}.weight"),
        None if activation is None else _scheme(ActivationScheme, activation, f"{where}.activation"),
    )


def _scheme(kind: type[Scheme], data: Mapping[str, Any], where: str) -> Scheme:
    _refuse_unknown(data, {field.name for field in fields(kind)}, where)
    try:
        return kind(**data)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _refuse_unknown(data: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(data) - known):
        raise ValueError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
