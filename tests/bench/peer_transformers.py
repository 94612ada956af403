"""transformers: the checkpoint itself, in float32."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import peer_child


def convert(checkpoint: Path, model: Path, precision: str) -> None:
    """Nothing has to be converted; link to the files."""
    shutil.copytree(checkpoint, model, copy_function=lambda source, target: Path(target).symlink_to(source))


class TransformersEngine:
    """Calls of the model with a cache that grows."""

    def __init__(self, model: Path, threads: int, slots: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def generate(self, input_ids: list[int], new_tokens: int, on_token: Callable[[int], None]) -> None:
        """One call for the prompt, of whose logits the last are asked for, and one a token."""
        given, cache = self._torch.tensor([input_ids]), None
        with self._torch.inference_mode():
            for _ in range(new_tokens):
                output = self._model(given, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                given = output.logits[:, -1].argmax(-1, keepdim=True)
                on_token(int(given))


if __name__ == "__main__":
    peer_child.main(convert, TransformersEngine)
