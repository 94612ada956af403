"""Which kind of quantized checkpoint a directory is."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgraph.models.quantized.coded import QuantizedCheckpoint
from kvgraph.models.quantized.settings import WHERE
from kvgraph.models.shards import stored_tensors
from kvgraph.models.strict_json import read_json_object

SETTINGS_KEY = "quantization_config"
# Where ModelOpt says it, also in the place of config.json.
SETTINGS_FILE = "hf_quant_config.json"
_MODELOPT = "modelopt"
# quant_method -> module with a `read_checkpoint`.
_METHODS = {
    "awq": "kvgraph.models.quantized.awq",
    "compressed-tensors": "kvgraph.models.quantized.compressed_tensors",
    "fp8": "kvgraph.models.quantized.fp8",
    "gptq": "kvgraph.models.quantized.gptq",
    _MODELOPT: "kvgraph.models.quantized.modelopt",
}


def read_quantized(directory: Path, config_json: Mapping[str, Any]) -> QuantizedCheckpoint | None:
    """The coded weights of a checkpoint directory, with every header checked; None of a float checkpoint.

    Raises:
        FileNotFoundError: A file of the weights is missing.
        ValueError: The checkpoint is quantized in a way that is not implemented, or is damaged.
    """
    settings, method = config_json.get(SETTINGS_KEY), None
    if settings is not None:
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    elif (directory / SETTINGS_FILE).is_file():
        settings, method = read_json_object(directory / SETTINGS_FILE), _MODELOPT
    else:
        return None
    if method not in _METHODS:
        raise ValueError(
            f"{directory}: {WHERE}: quant_method is {method!r}, known are {', '.join(_METHODS)}; give the float "
            "checkpoint and use kvgraph quantize"
        )
    read = importlib.import_module(_METHODS[method]).read_checkpoint
    found = read(settings, stored_tensors(directory))
    assert isinstance(found, QuantizedCheckpoint)
    return found
