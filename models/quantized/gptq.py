"""Checkpoints of GPTQ: `quant_method` "gptq", of AutoGPTQ and GPTQModel.

| tensor | shape | meaning |
|---|---|---|
| qweight | [I / n, O] int32 | codes, n = 32 / bits in a word |
| qzeros | [G, O / n] int32 | zero points, in `checkpoint_format` "gptq" one less than they are |
| scales | [G, O] | |
| g_idx | [I] int32 | the group of every input; missing: the groups follow one another |

With `desc_act` inputs were sorted by their activations before they were put into groups, and `g_idx` says how.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.quantized.coded import CodedWeight, CodeScheme, QuantizedCheckpoint
from kvgraph.models.quantized.column_codes import ColumnCodes
from kvgraph.models.quantized.input_order import input_order
from kvgraph.models.quantized.modules import read_modules, require_coded
from kvgraph.models.quantized.settings import WHERE, refuse_unread
from kvgraph.models.quantized.tensors import SCALE_DTYPES, ModuleTensors, read_whole
from kvgraph.models.safetensors_file import StoredTensor

METHOD = "gptq"
_CODES = "qweight"
# Zero points are stored less one by the first format.
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
# How codes were found, and how libraries load them.
_HARMLESS = (
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "lm_head",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "pad_token_id",
    "quant_method",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What config.json says.

    Attributes:
        bits: Of a code.
        group_size: How many inputs share a scale; -1: all.
        symmetric: Whether all zero points are half of the range.
        ordered: Whether inputs were sorted into groups.
        zero_offset: What a stored zero point is less than the one it stands for.
    """

    bits: Literal[4, 8]
    group_size: int
    symmetric: bool
    ordered: bool
    zero_offset: int


# Expressions for names of modules -> what they have instead; None leaves them float.
_Exceptions = list[tuple[str, _Settings | None]]


def read_checkpoint(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> QuantizedCheckpoint:
    """The tensors of a checkpoint, coded ones put together.

    Args:
        settings: `quantization_config` of config.json.
        tensors: Everything that the files hold.

    Raises:
        ValueError: The settings say what is not implemented, or the tensors contradict them.
    """
    reader = ConfigReader(settings, WHERE)
    common = _read_settings(reader)
    exceptions = _read_exceptions(reader, common)
    refuse_unread(reader, _HARMLESS)
    read = partial(_read_module, common=common, exceptions=exceptions)
    return require_coded(read_modules(METHOD, settings, tensors, read), WHERE, _CODES)


def _read_settings(reader: ConfigReader) -> _Settings:
    form = reader.text("checkpoint_format", "format", default="gptq")
    if form not in _ZERO_OFFSETS:
        raise reader.error(f"checkpoint_format is {form!r}, expected one of {', '.join(_ZERO_OFFSETS)}")
    packed = reader.text("pack_dtype", default="int32")
    if packed not in ("int32", "torch.int32"):
        raise reader.error(f"pack_dtype is {packed!r}, expected int32")
    return _Settings(
        _bits(reader, reader.integer("bits")),
        _group_size(reader, reader.integer("group_size", minimum=-1)),
        reader.flag("sym"),
        reader.flag("desc_act"),
        _ZERO_OFFSETS[form],
    )


def _bits(reader: ConfigReader, bits: int) -> Literal[4, 8]:
    if bits not in (4, 8):
        raise reader.error(f"bits is {bits}, expected 4 or 8")
    return 4 if bits == 4 else 8


def _group_size(reader: ConfigReader, size: int) -> int:
    if size == 0:
        raise reader.error("group_size is 0, expected a number of inputs, or -1 for all")
    return size


def _read_exceptions(reader: ConfigReader, common: _Settings) -> _Exceptions:
    """The modules that `dynamic` treats otherwise: "-:" leaves float what matches, "+:" changes its settings."""
    values = reader.value("dynamic") or {}
    if not isinstance(values, dict):
        raise reader.error(f"dynamic is {values!r}, expected an object")
    exceptions: _Exceptions = []
    for pattern, changes in values.items():
        expression = pattern.removeprefix("+:").removeprefix("-:")
        if pattern.startswith("-:"):
            exceptions.append((expression, None))
            continue
        inner = ConfigReader(changes, f"{WHERE}: dynamic: {pattern}")
        changed = replace(
            common,
            bits=_bits(inner, inner.integer("bits", default=common.bits)),
            group_size=_group_size(inner, inner.integer("group_size", minimum=-1, default=common.group_size)),
            symmetric=inner.flag("sym", default=common.symmetric),
            ordered=inner.flag("desc_act", default=common.ordered),
        )
        refuse_unread(inner, _HARMLESS)
        exceptions.append((expression, changed))
    return exceptions


def _settings_of(module: ModuleTensors, common: _Settings, exceptions: _Exceptions) -> _Settings:
    try:
        matched = [found for pattern, found in exceptions if re.match(pattern, module.module)]
    except re.error as error:
        raise ValueError(f"{WHERE}: dynamic holds no regular expression ({error})") from error
    settings = matched[0] if matched else common
    if settings is None:
        raise module.error(f"has a {_CODES}, but {WHERE} says in dynamic that it is not quantized")
    return settings


def _read_module(module: ModuleTensors, common: _Settings, exceptions: _Exceptions) -> CodedWeight | None:
    if not module.has(_CODES):
        return None
    settings = _settings_of(module, common, exceptions)
    per_word = 32 // settings.bits
    codes = module.find(_CODES, (torch.int32,))
    if len(codes.spec.shape) != 2:
        raise module.error(f"{_CODES} has shape {list(codes.spec.shape)}, expected two dimensions")
    words, outputs = codes.spec.shape
    inputs = words * per_word
    size = inputs if settings.group_size == -1 else settings.group_size
    if inputs % size or outputs % per_word:
        raise module.error(
            f"{outputs} outputs and {inputs} inputs are not whole words of {per_word} outputs and groups of {size}"
        )
    scale = module.find("scales", SCALE_DTYPES, ((inputs // size, outputs),))
    names = {(4, True): "int4", (4, False): "uint4", (8, True): "int8", (8, False): "uint8"}
    return ColumnCodes(
        name=f"{module.module}.weight",
        shape=(outputs, inputs),
        scheme=CodeScheme(
            names[settings.bits, settings.symmetric],  # type: ignore[arg-type]  # a literal by its place in the table
            None if size == inputs else size,
            scale.spec.dtype,
        ),
        bits=settings.bits,
        layout="gptq",
        codes=codes,
        zero_point=module.find("qzeros", (torch.int32,), ((inputs // size, outputs // per_word),)),
        scale=scale,
        zero_offset=settings.zero_offset,
        order=_order(module, settings, inputs, size),
    )


def _order(module: ModuleTensors, settings: _Settings, inputs: int, size: int) -> Tensor | None:
    if not module.has("g_idx"):
        if settings.ordered:
            raise module.error("g_idx is missing, which desc_act needs")
        return None
    groups = read_whole(module.find("g_idx", (torch.int32, torch.int64), ((inputs,),)))
    order = input_order(groups, size, f"{module.file}: {module.module}.g_idx")
    if order is not None and not settings.ordered:
        raise module.error("g_idx puts its inputs into an order, but the settings say desc_act false")
    return order
