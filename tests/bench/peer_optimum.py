"""optimum-onnx: its export, and its model class over ONNX Runtime, in float32."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peer_child


def convert(checkpoint: Path, model: Path, precision: str) -> None:
    """Run `optimum-cli export onnx`."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "onnx"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past", "--dtype", "fp32"]
    subprocess.run([*command, "--no-post-process", str(model)], check=True)


class OptimumEngine:
    """Calls of the model, which binds its cache to the session."""

    def __init__(self, model: Path, threads: int, slots: int) -> None:
        import torch
        from onnxruntime import SessionOptions
        from optimum.onnxruntime import ORTModelForCausalLM

        options = SessionOptions()
        options.intra_op_num_threads = threads
        self._torch = torch
        self._model = ORTModelForCausalLM.from_pretrained(model, session_options=options)

    def generate(self, input_ids: list[int], new_tokens: int, on_token: Callable[[int], None]) -> None:
        """One call for the prompt and one a token."""
        given, cache = self._torch.tensor([input_ids]), None
        for step in range(new_tokens):
            seen = self._torch.ones((1, len(input_ids) + step), dtype=self._torch.int64)
            positions = seen.cumsum(-1)[:, -given.shape[1] :] - 1
            output = self._model(
                given, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
            )
            cache = output.past_key_values
            given = output.logits[:, -1:].argmax(-1)
            on_token(int(given))


if __name__ == "__main__":
    peer_child.main(convert, OptimumEngine)
