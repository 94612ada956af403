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
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.quantized.coded import ActivationCode, CodedWeight, QuantizedCheckpoint
from kvgraph.models.quantized.fp8 import read_float8_matrix, refuse_float8
from kvgraph.models.quantized.modules import read_modules, require_coded
from kvgraph.models.quantized.reader import SETTINGS_FILE
from kvgraph.models.quantized.settings import refuse_unread, texts
from kvgraph.models.quantized.tensors import ModuleTensors
from kvgraph.models.safetensors_file import StoredTensor

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
    read = partial(_read_module, kept=kept)
    found = read_modules(METHOD, settings, tensors, read, cache_format=cache_format)
    return require_coded(found, _WHERE, _SCALE)


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


def _read_module(module: ModuleTensors, kept: Collection[str]) -> CodedWeight | None:
    if not module.has(_SCALE):
        refuse_float8(module, _SCALE)
        return None
    if names := [name for name in kept if fnmatch.fnmatchcase(module.module, name)]:
        raise module.error(f"has a {_SCALE}, but {_WHERE} excludes {names[0]!r}")
    activation = ActivationCode("float8_e4m3fn", module.scalar("input_scale"))
    return read_float8_matrix(module, _SCALE, None, activation)
