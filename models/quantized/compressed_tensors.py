"""Checkpoints of compressed-tensors: `quant_method` "compressed-tensors".

| format | weight | tensors |
|---|---|---|
| int-quantized, naive-quantized | int8 | weight, weight_scale, weight_zero_point |
| float-quantized, naive-quantized | float8_e4m3fn | weight, weight_scale |
| pack-quantized | int4, int8 | weight_packed, weight_scale, weight_zero_point, weight_shape, weight_g_idx |

Packed codes lie in words of 32 bits along the inputs, packed zero points along the outputs, both 8 (of four bits) or
128 (of eight) above what they stand for. A module is quantized where it has a weight_scale, as its group in the
settings says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.quantized.coded import CodedWeight, QuantizedCheckpoint
from kvgraph.models.quantized.compressed_module import read_module
from kvgraph.models.quantized.compressed_scheme import Group, read_cache_format, read_group
from kvgraph.models.quantized.modules import read_modules
from kvgraph.models.quantized.settings import WHERE, matches, refuse_unread, section, texts
from kvgraph.models.quantized.tensors import ModuleTensors
from kvgraph.models.safetensors_file import StoredTensor
from kvgraph.models.weights import TORCH_DTYPES

METHOD = "compressed-tensors"
_SCALE = "weight_scale"
_EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
# Bookkeeping.
_HARMLESS = (
    "quant_method",
    "version",
    "global_compression_ratio",
    "quantization_status",
    "run_compressed",
    "is_compressed",
)


@dataclass(frozen=True, slots=True)
class _Settings:
    """What config.json says.

    Attributes:
        groups: Each with the modules that it is for.
        ignore: Modules that are not quantized.
        cache_format: Of the KV cache; None leaves it float.
    """

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    cache_format: str | None

    def ignores(self, module: str) -> bool:
        """Whether a module is left float."""
        return any(matches(module, pattern) for pattern in self.ignore)

    def group(self, module: str) -> Group | None:
        """What a module is quantized by: names come before expressions, and those before classes."""
        named = [group for group in self.groups if module in group.targets]
        matched = [group for group in self.groups if any(matches(module, name) for name in group.targets)]
        linear = module.rpartition(".")[2] not in _EMBEDDINGS
        classes = [group for group in self.groups if linear and "Linear" in group.targets]
        return next(iter((*named, *matched, *classes)), None)


def read_checkpoint(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> QuantizedCheckpoint:
    """The tensors of a checkpoint, coded ones put together.

    Args:
        settings: `quantization_config` of config.json.
        tensors: Everything that the files hold.

    Raises:
        ValueError: The settings say what is not implemented, or the tensors contradict them.
    """
    known = _read_settings(settings)
    read = partial(_read_module, settings=known)
    return read_modules(METHOD, settings, tensors, read, cache_format=known.cache_format)


def _read_settings(settings: Mapping[str, Any]) -> _Settings:
    reader = ConfigReader(settings, WHERE)
    reader.require(
        "quantization_status", "compressed", "other states hold float weights that are rounded on the way"
    )
    for key in ("sparsity_config", "transform_config"):
        values = reader.value(key)
        if values and not (isinstance(values, dict) and values.get("format") == "dense"):
            raise reader.error(f"{key} is {values!r}, which is not implemented; expected none")
    default = reader.text("format", default="mixed-precision")
    groups = reader.value("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise reader.error(
            f"config_groups is {groups!r}, expected an object with a group for each kind of module"
        )
    found = tuple(
        read_group(section(reader, values, f"config_groups: {name}", WHERE), default)
        for name, values in groups.items()
    )
    scheme = reader.value("kv_cache_scheme")
    cache_format = None
    if scheme is not None:
        cache_format = read_cache_format(section(reader, scheme, "kv_cache_scheme", WHERE))
    ignore = texts(reader, "ignore")
    refuse_unread(reader, _HARMLESS)
    return _Settings(found, ignore, cache_format)


def _read_module(module: ModuleTensors, settings: _Settings) -> CodedWeight | None:
    if not module.has(_SCALE):
        _refuse_missing(module, settings)
        return None
    group = settings.group(module.module)
    if settings.ignores(module.module) or group is None:
        why = "lists it in ignore" if group else "has no group for it"
        raise module.error(f"has a {_SCALE}, but {WHERE} {why}")
    return read_module(module, group)


def _refuse_missing(module: ModuleTensors, settings: _Settings) -> None:
    """A matrix without scales must be one that the settings leave alone."""
    name, weight = module.module, module.stored("weight") or module.stored("weight_packed")
    if weight is None or len(weight.shape) != 2 or settings.ignores(name) or settings.group(name) is None:
        return
    # Routers and tied heads are no modules of the quantized class.
    is_float = TORCH_DTYPES[weight.dtype] in (torch.float32, torch.float16, torch.bfloat16)
    if is_float and name.rpartition(".")[2] in ("lm_head", "gate", "router"):
        return
    raise module.error(f"has no {_SCALE}, but {WHERE} says that it is quantized; list it in ignore")
