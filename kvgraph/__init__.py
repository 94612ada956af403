"""A static-graph compiler for Transformer language models.

kvgraph turns a checkpoint into two explicit ONNX graphs, prefill and decode, that carry the KV cache as inputs
and outputs; quantizes them; compiles them for ONNX Runtime and TensorRT; runs them; and compares every stage.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgraph.runtime.generation import Event, Generation, Options
    from kvgraph.runtime.model import Model, load
    from kvgraph.runtime.threads import Threads

__all__ = ["Event", "Generation", "Model", "Options", "Threads", "__version__", "load"]

__version__ = "0.1.0"

# Public name -> the module that has it.
_PUBLIC = {
    "Event": "kvgraph.runtime.generation",
    "Generation": "kvgraph.runtime.generation",
    "Model": "kvgraph.runtime.model",
    "Options": "kvgraph.runtime.generation",
    "Threads": "kvgraph.runtime.threads",
    "load": "kvgraph.runtime.model",
}


def __getattr__(name: str) -> Any:
    # Looked up when asked for: exporting needs no tokenizer, and `kvgraph --help` needs neither.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
