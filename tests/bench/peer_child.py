"""The two jobs of a peer, run in the peer's own environment: convert a checkpoint, or measure what came of it.

Every `peer_NAME.py` hands its functions to `main`, which gives them one command line:

    peer_NAME.py --convert CHECKPOINT --model DIR --precision int4
    peer_NAME.py --model DIR --prompt-tokens 512 --new-tokens 32 --threads 2 --json FILE

Only the standard library is imported here, so that what a peer needs in memory is its own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

# Ids are drawn below this one, which every vocabulary that is measured has.
_SMALLEST_VOCAB = 512
_WARM_UP_TOKENS = 512
_WARM_UP_STEPS = 4


class Engine(Protocol):
    """A loaded model."""

    def generate(self, input_ids: list[int], new_tokens: int, on_token: Callable[[int], None]) -> None:
        """Go on greedily after a prompt, in an empty cache; `on_token` gets each token as soon as it is there."""
        ...


Convert = Callable[[Path, Path, str], None]
"""Reads a checkpoint's directory, writes a model's directory, in a precision."""
Load = Callable[[Path, int, int], Engine]
"""Loads a model's directory for a number of threads and of cache slots."""


def prompt_ids(tokens: int, seed: int = 0) -> list[int]:
    """The prompt that every engine gets."""
    generator = random.Random(seed)
    return [generator.randrange(3, _SMALLEST_VOCAB) for _ in range(tokens)]


def measure(load: Load, model: Path, prompt_tokens: int, new_tokens: int, threads: int) -> dict[str, object]:
    """Load, warm up, and time one prompt and the steps behind it.

    The warm-up is a prompt of the same length, so that buffers have their size; a long one is cut, since it takes
    minutes and what it warms is the kernels.
    """
    start = time.perf_counter()
    engine = load(model, threads, prompt_tokens + new_tokens + 1)
    load_s = time.perf_counter() - start
    load_bytes = peak_memory_bytes()
    prompt = prompt_ids(prompt_tokens)
    # Other tokens: OpenVINO takes the beginning that two prompts share from the first.
    engine.generate(prompt_ids(prompt_tokens, seed=1)[:_WARM_UP_TOKENS], _WARM_UP_STEPS, lambda token: None)

    tokens: list[int] = []
    times: list[float] = []

    def on_token(token: int) -> None:
        times.append(time.perf_counter())
        tokens.append(token)

    start = time.perf_counter()
    # The prompt gives the first token, and each step one more.
    engine.generate(prompt, new_tokens + 1, on_token)
    if len(tokens) != new_tokens + 1:
        raise RuntimeError(f"{len(tokens)} tokens came, expected {new_tokens + 1}")
    return {
        "load_s": load_s,
        "load_peak_bytes": load_bytes,
        "peak_bytes": peak_memory_bytes(),
        "prefill_tokens_per_s": prompt_tokens / (times[0] - start),
        "decode_tokens_per_s": new_tokens / (times[-1] - times[0]),
        "tokens": tokens,
    }


def peak_memory_bytes() -> int:
    """The most memory that this process has had resident so far."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM; memory is measured on Linux only")
    return int(found[1]) * 1024


def main(convert: Convert, load: Load) -> None:
    """Parse the arguments, and do one of the two jobs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True, metavar="DIR")
    parser.add_argument("--convert", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--precision")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.convert is not None:
        convert(args.convert, args.model, args.precision)
        return
    result = measure(load, args.model, args.prompt_tokens, args.new_tokens, args.threads)
    text = json.dumps(result)
    print(text)
    if args.json is not None:
        args.json.write_text(text, encoding="utf-8")
