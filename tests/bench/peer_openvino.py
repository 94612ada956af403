"""OpenVINO: exported and compressed by optimum-intel, run by OpenVINO GenAI."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import peer_child

_FORMATS = {
    # Blocks of 32 with a scale and no zero point, and the head in 4 bits too, as the other peers have it.
    "int4": ["int4", "--group-size", "32", "--sym", "--ratio", "1.0", "--all-layers"],
    "int8": ["int8"],
    "float32": ["fp32"],
}


def convert(checkpoint: Path, model: Path, precision: str) -> None:
    """Run `optimum-cli export openvino`."""
    command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
    command += ["--model", str(checkpoint), "--task", "text-generation-with-past"]
    subprocess.run([*command, "--weight-format", *_FORMATS[precision], str(model)], check=True)


class OpenvinoEngine:
    """A pipeline with OpenVINO's defaults, which choose the arithmetic by what the processor has."""

    def __init__(self, model: Path, threads: int, slots: int) -> None:
        import openvino_genai

        self._library = openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, input_ids: list[int], new_tokens: int, on_token: Callable[[int], None]) -> None:
        """One call of the pipeline, which hands every token to a streamer."""
        import numpy as np
        import openvino

        openvino_genai = self._library

        class Streamer(openvino_genai.StreamerBase):
            def write(self, tokens):
                for token in [tokens] if isinstance(tokens, int) else tokens:
                    on_token(token)
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        ids = np.array([input_ids], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        self._pipeline.generate(inputs, config, Streamer())


if __name__ == "__main__":
    peer_child.main(convert, OpenvinoEngine)
