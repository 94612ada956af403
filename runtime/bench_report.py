"""What `kvgraph bench` measured: plain data, as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvgraph.runtime.machine import Machine
from kvgraph.runtime.session import SessionInfo


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to measure.

    Attributes:
        prompt_tokens: Tokens of each row's prompt.
        source_tokens: Tokens of each row's source, for a model with an encoder: 128, or as many as it takes.
        new_tokens: Tokens that each row then generates, and steps that are timed at each context.
        contexts: Tokens in use, that of the step included, at which decode is timed; default: `prompt_tokens`.
        batch_size: Rows.
        limit: Most slots of a cache; default: what the model allows.
        prefill_chunk: Most prompt tokens in one call; None feeds a prompt at once.
        threads: Threads within an operator, and of the bandwidth measurement; None for one a core.
        runs: How often everything is repeated, after one run that does not count.
        seed: Of the random token ids.

    Raises:
        ValueError: A number is out of its range.
    """

    prompt_tokens: int = 128
    source_tokens: int | None = None
    new_tokens: int = 32
    contexts: tuple[int, ...] = ()
    batch_size: int = 1
    limit: int | None = None
    prefill_chunk: int | None = None
    threads: int | None = None
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"prompt_tokens": 1, "new_tokens": 2, "batch_size": 1, "runs": 1}
        least |= {
            name: 1
            for name in ("source_tokens", "prefill_chunk", "threads")
            if getattr(self, name) is not None
        }
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {smallest} or more")


@dataclass(frozen=True, slots=True)
class Timing:
    """Repeated measurements of one thing, in seconds."""

    median_s: float
    fastest_s: float
    slowest_s: float
    count: int

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Timing:
        """Of at least one sample."""
        return cls(statistics.median(samples_s), min(samples_s), max(samples_s), len(samples_s))


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Decode at one number of tokens in use.

    Attributes:
        context: Tokens in use in each row, that of the step included.
        capacity: T, slots of the buffers.
        step: Time of the session's decode call.
        tokens_per_s: Tokens of all rows a second, by the median.
        bytes_read: Weights, cache and what is read of a source that a step has to read, as the bundle stores them.
        bytes_per_s: The same a second, by the median.
        bandwidth_share: Of the machine's measured memory bandwidth; None where it was not measured, and where the
            processor's last cache holds all that a step reads, so that memory has no part in it.
    """

    context: int
    capacity: int
    step: Timing
    tokens_per_s: float
    bytes_read: int
    bytes_per_s: float
    bandwidth_share: float | None


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A bundle's speed on one machine.

    Attributes:
        bundle: Its path.
        target: What `kvgraph build` made of it and was measured; None for the bundle's own graphs.
        model_type: Its family.
        dtype: Type of its weights.
        weights_bytes: Weights that a decode step reads, as the bundle stores them.
        cache_bytes_per_token: Cache bytes of one token of one row.
        session: What it ran on.
        machine: Where.
        options: What was asked for.
        load_s: Opening the session, the import of its runtime included.
        first_run_s: From a prompt to its first token in the first run, which reads the weights from disk or its cache.
        time_to_first_token: The same in later runs.
        encode: Time of encoding all sources, which is not in the time to the first token; None without an encoder.
        prefill: Time of the session's prefill calls for all prompts.
        prefill_tokens_per_s: Prompt tokens of all rows a second, by the median.
        loop_overhead: What the generation loop takes between two calls of the session: sampling, text, stop rules.
        decode: One entry a context.
        memory_in_use_bytes: Memory of the process after decoding, each page once; None where the system does not say.
        peak_memory_bytes: Most resident memory of the process, weights counted once for each graph that maps them. The
            buffer of the bandwidth measurement is left out.
        memory_bandwidth_bytes_per_s: The best that `read_bandwidth` reached; None where the model runs on a GPU.
    """

    bundle: str
    target: str | None
    model_type: str
    dtype: str
    weights_bytes: int
    cache_bytes_per_token: int
    session: SessionInfo
    machine: Machine
    options: BenchOptions
    load_s: float
    first_run_s: float
    time_to_first_token: Timing
    encode: Timing | None
    prefill: Timing
    prefill_tokens_per_s: float
    loop_overhead: Timing
    decode: tuple[DecodeSpeed, ...]
    memory_in_use_bytes: int | None
    peak_memory_bytes: int
    memory_bandwidth_bytes_per_s: float | None

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)
