"""The groups in the settings of compressed-tensors: how the modules of one are quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.quantized.settings import refuse_unread, texts

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
Strategy = Literal["tensor", "channel", "group", "block"]
# How scales were found.
_HARMLESS = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """How weights are rounded.

    Attributes:
        bits: Of a code.
        kind: "int" or "float".
        symmetric: Whether there are no zero points.
        strategy: What shares a scale.
        group_size: Inputs that share one, for strategy "group".
        block: Outputs and inputs that share one, for strategy "block".
        ordered: Whether inputs were sorted into groups.
    """

    bits: int
    kind: str
    symmetric: bool
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    ordered: bool


@dataclass(frozen=True, slots=True)
class InputSettings:
    """How the inputs of a module are rounded.

    Attributes:
        format: "int8" or "float8_e4m3fn".
        dynamic: Whether each token has its own scale.
        group_size: How many entries of a token share one; None: all.
    """

    format: Literal["int8", "float8_e4m3fn"]
    dynamic: bool
    group_size: int | None


@dataclass(frozen=True, slots=True)
class Group:
    """What some modules have in common.

    Attributes:
        targets: Names, "re:" expressions, or "Linear" for all modules of that class.
        packed: Whether the codes are packed; None: either.
        weights: How weights are rounded.
        inputs: How inputs are; None leaves them float.
    """

    targets: tuple[str, ...]
    packed: bool | None
    weights: WeightSettings
    inputs: InputSettings | None


def read_group(reader: ConfigReader, default_format: str) -> Group:
    """A group of `config_groups`.

    Raises:
        ValueError: It says what is not implemented.
    """
    form = reader.text("format", default=default_format)
    if form not in FORMATS:
        raise reader.error(f"format is {form!r}, expected one of {', '.join(FORMATS)}")
    targets = texts(reader, "targets")
    weights = reader.section("weights")
    inputs = reader.section("input_activations")
    reader.require("output_activations", None, "outputs are not rounded")
    refuse_unread(reader)
    if weights is None or not targets:
        raise reader.error("targets or weights are missing; expected both")
    packed = None if form == "mixed-precision" else form == "pack-quantized"
    return Group(targets, packed, _read_weights(weights), None if inputs is None else _read_inputs(inputs))


def read_cache_format(reader: ConfigReader) -> str:
    """The format of `kv_cache_scheme`: one calibrated scale for each tensor.

    Raises:
        ValueError: It says what is not implemented.
    """
    form = _format(reader)
    strategy = reader.text("strategy", default="tensor")
    if strategy != "tensor" or reader.flag("dynamic", default=False):
        raise reader.error(f"strategy {strategy!r} is not implemented, expected 'tensor' that is not dynamic")
    _require_symmetric(reader)
    reader.ignore("group_size", "block_structure", "actorder")
    refuse_unread(reader, _HARMLESS)
    return form


def _read_weights(reader: ConfigReader) -> WeightSettings:
    bits, kind = reader.integer("num_bits", default=8), reader.text("type", default="int")
    if (bits, kind) not in ((4, "int"), (8, "int"), (8, "float")):
        raise reader.error(f"num_bits is {bits} of type {kind!r}, expected int of 4 or 8, or float of 8")
    size = reader.value("group_size")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = reader.text("strategy", default=inferred)
    if strategy not in ("tensor", "channel", "group", "block"):
        raise reader.error(f"strategy is {strategy!r}, expected tensor, channel, group or block")
    group_size = reader.integer("group_size") if strategy == "group" else None
    order = reader.value("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise reader.error(f"actorder is {order!r}, expected weight, static, group or dynamic")
    symmetric = reader.flag("symmetric", default=True)
    if kind == "float" and not symmetric:
        raise reader.error("symmetric is false of type 'float', which has no zero points")
    reader.require("dynamic", False, "weights have scales of their own")
    block = _block(reader) if strategy == "block" else None
    reader.ignore("block_structure")
    refuse_unread(reader, _HARMLESS)
    return WeightSettings(bits, kind, symmetric, strategy, group_size, block, order in ("group", "dynamic"))


def _read_inputs(reader: ConfigReader) -> InputSettings:
    form = _format(reader)
    size = reader.value("group_size")
    strategy = reader.text("strategy", default="tensor" if size is None else "group")
    dynamic = reader.flag("dynamic", default=False)
    if (strategy, dynamic) not in (("tensor", False), ("token", True), ("group", True)):
        raise reader.error(
            f"strategy {strategy!r} with dynamic {dynamic} is not implemented; expected a static tensor, or a dynamic "
            "token or group"
        )
    _require_symmetric(reader)
    reader.require("actorder", None, "inputs have no order")
    reader.ignore("block_structure")
    refuse_unread(reader, _HARMLESS)
    return InputSettings(form, dynamic, reader.integer("group_size") if strategy == "group" else None)


def _format(reader: ConfigReader) -> Literal["int8", "float8_e4m3fn"]:
    bits, kind = reader.integer("num_bits", default=8), reader.text("type", default="int")
    if bits != 8 or kind not in ("int", "float"):
        raise reader.error(f"num_bits is {bits} of type {kind!r}, expected 8 of int or float")
    return "int8" if kind == "int" else "float8_e4m3fn"


def _require_symmetric(reader: ConfigReader) -> None:
    if not reader.flag("symmetric", default=True):
        raise reader.error("symmetric is false, but inputs and caches with zero points are not implemented")


def _block(reader: ConfigReader) -> tuple[int, int]:
    """Outputs and inputs of a block, given as a list or as "128x128"."""
    value = reader.value("block_structure")
    sides = value.split("x") if isinstance(value, str) else value
    if not isinstance(sides, list) or len(sides) != 2 or not all(str(side).isdecimal() for side in sides):
        raise reader.error(f"block_structure is {value!r}, expected two numbers such as [128, 128]")
    return int(sides[0]), int(sides[1])
