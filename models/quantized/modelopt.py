"""Checkpoints of ModelOpt with `quant_algo` "FP8", by `hf_quant_config.json` or `quant_method` "modelopt".

| tensor | shape | meaning |
|---|---|---|
| weight | [O, I] float8_e4m3fn | codes |
| weight_scale | [] | what codes are multiplied by |
| input_scale | [] | scale of the input |
| k_proj.k_scale, v_proj.v_scale | [] | scales of the cache, with `kv_cache_quant_algo` "FP8" |
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.quantized.cache_scales import read_cache_code
from kvgraph.models.quantized.coded import ActivationCode, CodedWeight, QuantizedCheckpoint
from kvgraph.models.quantized.fp8 import read_float8_matrix
from kvgraph.models.quantized.reader import SETTINGS_FILE
from kvgraph.models.quantized.settings import refuse_unread, texts
from kvgraph.models.quantized.tensors import ModuleTensors, group_by_module
from kvgraph.models.safetensors_file import StoredTensor
from kvgraph.models.weights import SafetensorsWeight

METHOD = "modelopt"
_SCALE = "weight_scale"
_WHERE = f"{SETTINGS_FILE} or config.json: quantization_config"
# Bookkeeping; config_groups repeats in other words what quant_algo says.
_HARMLESS = ("producer", "quant_method", "config_groups", "quantized_layers")


def read_checkpoint(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> QuantizedCheckpoint:
    """The tensors of a checkpoint, coded ones put together.

    Args:
        settings: The content of hf_quant_config.json, or `quantization_config` of config.json.
        tensors: Everything that the files hold.

    Raises:
        ValueError: The settings say what is not implemented, or the tensors contradict them.
    """
    outer = ConfigReader(settings, _WHERE)
    reader = outer.section("quantization") or outer
    kept, cache_format = _read_settings(reader)
    refuse_unread(outer, _HARMLESS)
    refuse_unread(reader, _HARMLESS)
    coded: dict[str, CodedWeight] = {}
    used: set[str] = set()
    for module, parts in group_by_module(tensors).items():
        found = ModuleTensors(module, parts)
        if _SCALE not in parts:
            if "weight" in parts and parts["weight"].dtype == "F8_E4M3":
                raise found.error(f"{_SCALE} is missing, without which its codes stand for nothing")
            continue
        if names := [name for name in kept if fnmatch.fnmatchcase(module, name)]:
            raise found.error(f"has a {_SCALE}, but {_WHERE} excludes {names[0]!r}")
        activation = ActivationCode("float8_e4m3fn", found.scalar("input_scale"))
        coded[f"{module}.weight"] = read_float8_matrix(found, _SCALE, None, activation)
        used |= {f"{module}.{suffix}" for suffix in found.known}
    if not coded:
        raise ValueError(f"{_WHERE}: says {METHOD}, but there is no {_SCALE}")
    cache, cache_tensors = read_cache_code(cache_format, tensors)
    plain = {
        name: SafetensorsWeight(stored)
        for name, stored in tensors.items()
        if name not in used | cache_tensors
    }
    return QuantizedCheckpoint(METHOD, settings, coded, plain, cache)


def _read_settings(reader: ConfigReader) -> tuple[tuple[str, ...], str | None]:
    """Modules that are not quantized, and the format of the cache."""
    algorithm = reader.text("quant_algo")
    if algorithm != "FP8":
        raise reader.error(f"quant_algo is {algorithm!r}, expected 'FP8'")
    reader.ignore("group_size")
    cache = reader.value("kv_cache_quant_algo")
    if cache not in (None, "FP8"):
        raise reader.error(f"kv_cache_quant_algo is {cache!r}, expected 'FP8' or null")
    scheme = reader.value("kv_cache_scheme")
    if scheme is not None:
        inner = ConfigReader(scheme, f"{_WHERE}: kv_cache_scheme")
        for key, value in (("num_bits", 8), ("type", "float"), ("dynamic", False)):
            inner.require(key, value, "other caches are not implemented")
        refuse_unread(inner)
    kept = (*texts(reader, "exclude_modules"), *texts(reader, "ignore"))
    return kept, "float8_e4m3fn" if cache or scheme else None
