"""onnxruntime-genai: its model builder, and its generator."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peer_child

_PRECISIONS = {"int4": "int4", "int8": "int8", "float32": "fp32"}


def convert(checkpoint: Path, model: Path, precision: str) -> None:
    """Run the builder with its defaults, which for 4 and 8 bits are blocks of 32 and INT8 arithmetic."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(checkpoint), "-o", str(model), "-p", _PRECISIONS[precision]]
    subprocess.run([*command, "-e", "cpu", "-c", str(model / "cache")], check=True)


class GenaiEngine:
    """One generator a prompt, since it holds the cache."""

    def __init__(self, model: Path, threads: int, slots: int) -> None:
        import onnxruntime_genai

        self._library = onnxruntime_genai
        config = onnxruntime_genai.Config(str(model))
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = onnxruntime_genai.Model(config)
        self._params = onnxruntime_genai.GeneratorParams(self._model)
        self._params.set_search_options(max_length=slots, do_sample=False)

    def generate(self, input_ids: list[int], new_tokens: int, on_token: Callable[[int], None]) -> None:
        """One call a token, behind the one that runs the prompt."""
        generator = self._library.Generator(self._model, self._params)
        generator.append_tokens(input_ids)
        for _ in range(new_tokens):
            generator.generate_next_token()
            on_token(int(generator.get_next_tokens()[0]))


if __name__ == "__main__":
    peer_child.main(convert, GenaiEngine)
