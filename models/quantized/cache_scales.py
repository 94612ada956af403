"""Scales of the KV cache that a checkpoint carries: a key's and a value's in every attention block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from kvgraph.models.quantized.coded import CacheCode
from kvgraph.models.quantized.tensors import ModuleTensors, group_by_module
from kvgraph.models.safetensors_file import StoredTensor

# "model.layers.3.self_attn.k_scale", or "model.layers.3.self_attn.k_proj.k_scale".
_SCALE = re.compile(r"(?P<module>.*\.(?P<layer>\d+)\.\w+(?:\.[kv]_proj)?)\.(?P<side>[kv])_scale")
_SIDES = {"k": "key", "v": "value"}


def read_cache_code(
    form: str | None, tensors: Mapping[str, StoredTensor]
) -> tuple[CacheCode | None, set[str]]:
    """How the cache is rounded, and the names of the tensors that say so.

    Args:
        form: "int8" or "float8_e4m3fn" as the settings say; None: the cache stays float.
        tensors: Everything that the files hold.

    Raises:
        ValueError: There are scales that the settings do not ask for, or none that they do.
    """
    modules = group_by_module(tensors)
    scales: dict[tuple[int, str], float] = {}
    names: set[str] = set()
    for name, stored in tensors.items():
        found = _SCALE.fullmatch(name)
        if found is None:
            continue
        if form is None:
            raise ValueError(
                f"{stored.file}: {name!r} is a scale of the cache, but the settings ask for no quantized cache"
            )
        module = ModuleTensors(found["module"], modules[found["module"]])
        scales[int(found["layer"]), _SIDES[found["side"]]] = module.scalar(f"{found['side']}_scale")
        names.add(name)
    if form is None:
        return None, names
    if not scales:
        raise ValueError("the settings ask for a quantized cache, but there is no k_scale or v_scale")
    kind: Literal["int8", "float8_e4m3fn"] = "int8" if form == "int8" else "float8_e4m3fn"
    return CacheCode(kind, scales), names
