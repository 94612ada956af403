"""Checkpoints of AWQ: `quant_method` "awq", version "gemm".

| tensor | shape | meaning |
|---|---|---|
| qweight | [I, O / 8] int32 | codes, see `kvgraph.models.quantized.column_codes` |
| qzeros | [G, O / 8] int32 | zero points |
| scales | [G, O] | |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.quantized.coded import CodedWeight, CodeScheme, QuantizedCheckpoint
from kvgraph.models.quantized.column_codes import ColumnCodes
from kvgraph.models.quantized.modules import read_modules, require_coded
from kvgraph.models.quantized.settings import WHERE, refuse_unread, texts
from kvgraph.models.quantized.tensors import SCALE_DTYPES, ModuleTensors
from kvgraph.models.safetensors_file import StoredTensor

METHOD = "awq"
_CODES = "qweight"
_PER_WORD = 8
# How libraries load the codes.
_HARMLESS = (
    "backend",
    "do_fuse",
    "exllama_config",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "provider",
    "quant_method",
)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What config.json says.

    Attributes:
        group_size: How many inputs share a scale; -1: all.
        kept: Parts of names of modules that are not quantized.
    """

    group_size: int
    kept: tuple[str, ...]


def read_checkpoint(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> QuantizedCheckpoint:
    """The tensors of a checkpoint, coded ones put together.

    Args:
        settings: `quantization_config` of config.json.
        tensors: Everything that the files hold.

    Raises:
        ValueError: The settings say what is not implemented, or the tensors contradict them.
    """
    known = _read_settings(settings)
    found = read_modules(METHOD, settings, tensors, partial(_read_module, settings=known))
    return require_coded(found, WHERE, _CODES)


def _read_settings(settings: Mapping[str, Any]) -> _Settings:
    reader = ConfigReader(settings, WHERE, {"bits": ("w_bit",), "group_size": ("q_group_size",)})
    version = reader.text("version", "format", default="gemm")
    if version.lower() != "gemm":
        raise reader.error(f"version is {version!r}, expected 'gemm'; the others pack codes in other ways")
    if reader.integer("bits") != 4:
        raise reader.error(f"bits is {reader.value('bits')!r}, expected 4")
    if not reader.flag("zero_point"):
        raise reader.error("zero_point is false, expected true: the format stores zero points")
    size = reader.integer("group_size", minimum=-1)
    if size == 0:
        raise reader.error("group_size is 0, expected a number of inputs, or -1 for all")
    known = _Settings(size, texts(reader, "modules_to_not_convert"))
    refuse_unread(reader, _HARMLESS)
    return known


def _read_module(module: ModuleTensors, settings: _Settings) -> CodedWeight | None:
    if not module.has(_CODES):
        return None
    if kept := [name for name in settings.kept if name in module.module]:
        raise module.error(f"has a {_CODES}, but {WHERE} keeps {kept[0]!r} by modules_to_not_convert")
    codes = module.find(_CODES, (torch.int32,))
    if len(codes.spec.shape) != 2:
        raise module.error(f"{_CODES} has shape {list(codes.spec.shape)}, expected two dimensions")
    inputs, words = codes.spec.shape
    size = inputs if settings.group_size == -1 else settings.group_size
    if inputs % size:
        raise module.error(f"group_size {size} does not divide its {inputs} inputs")
    groups, outputs = inputs // size, words * _PER_WORD
    scale = module.find("scales", SCALE_DTYPES, ((groups, outputs),))
    return ColumnCodes(
        name=f"{module.module}.weight",
        shape=(outputs, inputs),
        scheme=CodeScheme("uint4", None if size == inputs else size, scale.spec.dtype),
        bits=4,
        layout="awq",
        codes=codes,
        zero_point=module.find("qzeros", (torch.int32,), ((groups, words),)),
        scale=scale,
        zero_offset=0,
        order=None,
    )
