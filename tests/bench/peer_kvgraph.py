"""kvgraph: export with a recipe and build by its command line, and its session and loop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peer_child

_CLI = (sys.executable, "-m", "kvgraph")
_TARGET = "ort-cpu"
# What a prompt is fed in at most, as in llama.cpp.
_PREFILL_CHUNK = 512


def convert(checkpoint: Path, model: Path, precision: str) -> None:
    """Export and build; `precision` is a recipe, or "float" where nothing is quantized."""
    recipe = [] if precision == "float" else ["--recipe", precision]
    _run("export", str(checkpoint), "-o", str(model), "--dtype", "bfloat16", *recipe, "--force")
    _run("build", str(model), "--target", _TARGET)


def _run(*arguments: str) -> None:
    subprocess.run([*_CLI, *arguments], check=True)


class KvgraphEngine:
    """A session over the built target, and one cache."""

    def __init__(self, model: Path, threads: int, slots: int) -> None:
        from kvgraph.export.bundle import Bundle
        from kvgraph.runtime.open import open_session

        self._session = open_session(Bundle.open(model), _TARGET, threads=threads)
        self._cache = self._session.allocate_cache(1, slots)

    def generate(self, input_ids: list[int], new_tokens: int, on_token: Callable[[int], None]) -> None:
        """The library's own loop, which takes the cache as empty."""
        from kvgraph.runtime.generate import stream
        from kvgraph.runtime.generation import GenerationParams

        params = GenerationParams(max_new_tokens=new_tokens, eos_token_ids=(), prefill_chunk=_PREFILL_CHUNK)
        for event in stream(self._session, [input_ids], params, cache=self._cache):
            on_token(event.token_id)


if __name__ == "__main__":
    peer_child.main(convert, KvgraphEngine)
