"""The tensors of a quantized checkpoint, put together module by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvgraph.models.quantized.cache_scales import read_cache_code
from kvgraph.models.quantized.coded import CodedWeight, QuantizedCheckpoint
from kvgraph.models.quantized.tensors import ModuleTensors, group_by_module
from kvgraph.models.safetensors_file import StoredTensor
from kvgraph.models.weights import SafetensorsWeight


def read_modules(
    method: str,
    settings: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    read: Callable[[ModuleTensors], CodedWeight | None],
    *,
    cache_format: str | None = None,
) -> QuantizedCheckpoint:
    """A checkpoint whose coded weights `read` puts together.

    Args:
        method: Of the checkpoint.
        settings: What it says of its quantization.
        tensors: Everything that the files hold.
        read: A module's coded weight, None where it is float. What it asks the module for is part of the weight.
        cache_format: "int8" or "float8_e4m3fn" as the settings say; None: the cache stays float.

    Raises:
        ValueError: The settings contradict the scales of the cache.
    """
    coded: dict[str, CodedWeight] = {}
    used: set[str] = set()
    for name, parts in group_by_module(tensors).items():
        module = ModuleTensors(name, parts)
        weight = read(module)
        if weight is not None:
            coded[f"{name}.weight"] = weight
            used |= {f"{name}.{suffix}" for suffix in module.known}
    cache, cache_tensors = read_cache_code(cache_format, tensors)
    used |= cache_tensors
    plain = {name: SafetensorsWeight(stored) for name, stored in tensors.items() if name not in used}
    return QuantizedCheckpoint(method, settings, coded, plain, cache)


def require_coded(checkpoint: QuantizedCheckpoint, where: str, suffix: str) -> QuantizedCheckpoint:
    """The checkpoint, where any of its weights are coded.

    Args:
        checkpoint: From `read_modules`.
        where: What says that they are.
        suffix: The tensor of a module that shows it.

    Raises:
        ValueError: There are none.
    """
    if not checkpoint.coded:
        raise ValueError(f"{where}: says {checkpoint.method}, but there is no {suffix}")
    return checkpoint
