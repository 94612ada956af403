"""Measuring a session: loading, prefill, decode at given contexts, and what the generation loop adds.

Times are medians over all steps of several runs, with the fastest and the slowest beside them; the first run warms
up and counts only for itself. Prompts are random token ids, the same for the same seed, and no token ends a text.

Decode at a context of N tokens is the step that writes slot N - 1, repeated. The slots below are filled by prefill.
Zeros are no stand-in: attention weights over them are all equal, where real ones may be denormal numbers, on which a
CPU that does not flush them is slow (1.5 times the time of a step over 512 tokens of a tiny model).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import Contract
from kvgraph.runtime.bandwidth import read_bandwidth
from kvgraph.runtime.bench_report import BenchOptions, BenchReport, DecodeSpeed, Timing
from kvgraph.runtime.bench_source import check_source_tokens, source_bytes, with_sources
from kvgraph.runtime.element_types import element_type
from kvgraph.runtime.encoder_session import has_encoder
from kvgraph.runtime.generate import stream
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.machine import (
    core_count,
    describe_machine,
    last_level_cache_bytes,
    memory_in_use_bytes,
    peak_memory_bytes,
)
from kvgraph.runtime.prefill import prefill_prompts
from kvgraph.runtime.resident_weights import WEIGHTS_FILE
from kvgraph.runtime.session import Cache, Ids, Session
from kvgraph.runtime.timed_session import TimedSession
from kvgraph.runtime.tokenizer import Tokenizer

# Where the graphs differ in a weight, its name starts with its graph's.
_PREFILL, _DECODE = "prefill.", "decode."
# What an encoder reads once for a source.
_ENCODER, _CROSS = "model.encoder.", (".cross_attn.k_proj.", ".cross_attn.v_proj.")
# A layer's experts, of which each token reads those that it chose.
_EXPERTS = ".mlp.experts."
_TOKEN_TABLE, _POSITION_TABLE = "model.embed_tokens.", "model.embed_positions."
# Steps before the timed ones: the first grows the buffers and binds them.
_WARM_UP_STEPS = 2
# Tokens a call when a cache is filled, so that a long context needs no S x S memory.
_FILL_CHUNK = 256


def bench(
    bundle: Bundle,
    open_session: Callable[[], Session],
    options: BenchOptions,
    tokenizer: Tokenizer | None = None,
    target: str | None = None,
) -> BenchReport:
    """Measure a bundle.

    Args:
        bundle: What `open_session` opens.
        open_session: Called once, and timed.
        options: What to measure.
        tokenizer: Makes the text of the tokens, as a part of the loop; None leaves that out.
        target: Name of the target that `open_session` opens, for the report.

    Raises:
        ValueError: The prompt, the new tokens or a context do not fit into the cache.
    """
    target = bundle.choose_target(target)
    machine = describe_machine()
    start = time.perf_counter()
    session = open_session()
    load_s = time.perf_counter() - start
    options = _checked(options, session.contract)
    encode = None
    if has_encoder(session):
        session, encode = with_sources(session, options)
    first, *runs = _time_runs(session, options, tokenizer)
    decoding = _time_steps(session, options)
    prefill = Timing.of([run.prefill_s for run in runs])
    weights = weights_read(bundle, target, options.batch_size)
    return BenchReport(
        bundle=str(bundle.path),
        target=target,
        model_type=bundle.model_type,
        dtype=bundle.dtype,
        weights_bytes=weights,
        cache_bytes_per_token=cache_bytes_per_token(session.contract),
        session=session.info,
        machine=machine,
        options=options,
        load_s=load_s,
        first_run_s=first.first_token_s,
        time_to_first_token=Timing.of([run.first_token_s for run in runs]),
        encode=encode,
        prefill=prefill,
        prefill_tokens_per_s=options.batch_size * options.prompt_tokens / prefill.median_s,
        loop_overhead=Timing.of([gap for run in runs for gap in run.gaps_s]),
        decode=_speeds(weights, session, options, decoding),
        memory_in_use_bytes=decoding.memory_in_use_bytes,
        peak_memory_bytes=decoding.peak_memory_bytes,
        memory_bandwidth_bytes_per_s=decoding.bandwidth,
    )


def weights_read(bundle: Bundle, target: str | None = None, batch_size: int = 1) -> int:
    """Bytes of the weights that a decode step reads, as the target stores them, or the bundle where it has none.

    That is all of them except those of prefill or an encoder alone, and embedding tables: of those a step reads a row,
    unless the table is the head too. Of experts it is those that the rows choose, each its own.
    """
    tables = (_POSITION_TABLE,) if bundle.config["tie_word_embeddings"] else (_POSITION_TABLE, _TOKEN_TABLE)
    num_experts = bundle.config.get("num_local_experts") or bundle.config.get("num_experts") or 1
    chosen = min(num_experts, batch_size * bundle.config.get("num_experts_per_tok", 1))
    sizes = [
        size * (chosen if _EXPERTS in name else num_experts)
        for name, size in _weight_sizes(bundle, target).items()
        if not name.startswith((_PREFILL, _ENCODER))
        and not any(part in name for part in _CROSS)
        and not name.removeprefix(_DECODE).startswith(tables)
    ]
    return int(sum(sizes) // num_experts)


def _weight_sizes(bundle: Bundle, target: str | None) -> Mapping[str, int]:
    """Tensor name -> bytes in the target's weights file or the bundle's; an engine that is alone holds its own."""
    own = None if target is None else bundle.target_path(target) / WEIGHTS_FILE
    path = own if own is not None and own.is_file() else bundle.path / WEIGHTS_FILE
    if bundle.standalone is not None and not path.is_file():
        return bundle.weight_sizes()
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def cache_bytes_per_token(contract: Contract) -> int:
    """Bytes that one token of one row takes in the cache."""
    return sum(
        int(tensor.shape[1]) * int(tensor.shape[3]) * element_type(tensor.dtype).carrier.itemsize
        for tensor in contract.state
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Times of one generation, in seconds."""

    first_token_s: float
    prefill_s: float
    gaps_s: list[float]


@dataclass(frozen=True, slots=True)
class _Steps:
    """Times of decode steps at one context."""

    context: int
    capacity: int
    durations_s: list[float]


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Decode at every context, and what was measured between."""

    steps: list[_Steps]
    memory_in_use_bytes: int | None
    peak_memory_bytes: int
    bandwidth: float | None


def _checked(options: BenchOptions, contract: Contract) -> BenchOptions:
    """The options with their defaults filled in, if they fit the model."""
    source_tokens = check_source_tokens(contract, options.source_tokens)
    most = contract.capacity or contract.max_positions
    limit = most if options.limit is None else options.limit
    contexts = options.contexts or (options.prompt_tokens,)
    if not 1 <= limit <= most:
        raise ValueError(f"limit is {limit}, expected 1 to {most}, the slots that the model allows")
    for context in contexts:
        if not 1 <= context <= limit:
            raise ValueError(f"context is {context}, expected 1 to {limit}, the slots of the cache")
    if options.prompt_tokens + options.new_tokens > limit:
        raise ValueError(
            f"prompt_tokens {options.prompt_tokens} and new_tokens {options.new_tokens} exceed the {limit} slots of "
            "the cache; ask for fewer"
        )
    return replace(options, limit=limit, contexts=contexts, source_tokens=source_tokens)


def _random_ids(options: BenchOptions, contract: Contract, tokens: int) -> Ids:
    """Valid token ids [B, tokens]."""
    random = np.random.default_rng(options.seed)
    return random.integers(0, contract.vocab_size, (options.batch_size, tokens))


def _time_runs(session: Session, options: BenchOptions, tokenizer: Tokenizer | None) -> list[_Run]:
    """One generation to warm up, and then `runs` that count."""
    prompts = list(_random_ids(options, session.contract, options.prompt_tokens))
    params = GenerationParams(
        max_new_tokens=options.new_tokens, eos_token_ids=(), prefill_chunk=options.prefill_chunk
    )
    runs = []
    for _ in tqdm(range(options.runs + 1), desc="generating", unit="run", disable=None):
        timed = TimedSession(session)
        start = time.perf_counter()
        cache = timed.allocate_cache(options.batch_size, options.limit)
        events = stream(timed, prompts, params, tokenizer, cache)
        next(events)
        first_token_s = time.perf_counter() - start
        for _ in events:
            pass
        prefill_s = sum(call.duration_s for call in timed.calls if call.graph == "prefill")
        runs.append(_Run(first_token_s, prefill_s, timed.gaps_s()))
    return runs


def _time_steps(session: Session, options: BenchOptions) -> _Decoding:
    """Decode steps at each context, and the memory bandwidth.

    Runs go over all contexts and the bandwidth in turn, so that a slow minute of the machine hits each of them.
    """
    # One each: the buffers of a longer context would make a shorter one slower.
    caches = {context: _filled_cache(session, options, context) for context in options.contexts}
    durations_s: dict[int, list[float]] = {context: [] for context in caches}
    memory, peak_memory, bandwidth = None, 0, None
    for run in tqdm(range(options.runs), desc="decoding", unit="run", disable=None):
        for context, cache in caches.items():
            durations_s[context] += _time_context(session, cache, options, context)
        if run == 0:
            # Before the buffer of the bandwidth measurement; later runs need no more than the first.
            memory, peak_memory = memory_in_use_bytes(), peak_memory_bytes()
        if session.info.device == "cpu":
            bandwidth = max(bandwidth or 0.0, read_bandwidth(options.threads or core_count()))
    steps = [_Steps(context, cache.capacity, durations_s[context]) for context, cache in caches.items()]
    return _Decoding(steps, memory, peak_memory, bandwidth)


def _filled_cache(session: Session, options: BenchOptions, context: int) -> Cache:
    """A cache of `context` - 1 random tokens in every row."""
    cache = session.allocate_cache(options.batch_size, options.limit)
    if context > 1:
        prompts = list(_random_ids(options, session.contract, context - 1))
        past_length = np.zeros(options.batch_size, np.int64)
        prefill_prompts(session, cache, prompts, past_length, options.prefill_chunk or _FILL_CHUNK)
    return cache


def _time_context(session: Session, cache: Cache, options: BenchOptions, context: int) -> list[float]:
    """Seconds of each decode step with `context` tokens in use."""
    timed = TimedSession(session)
    input_ids = _random_ids(options, session.contract, 1)
    past_length = np.full(options.batch_size, context - 1, np.int64)
    for _ in range(_WARM_UP_STEPS + options.new_tokens):
        timed.decode(cache, input_ids, past_length)
    return [call.duration_s for call in timed.calls[_WARM_UP_STEPS:]]


def _speeds(
    weights: int, session: Session, options: BenchOptions, decoding: _Decoding
) -> tuple[DecodeSpeed, ...]:
    """Tokens and bytes a second at each context, where a step reads so many bytes of weights."""
    cache_size, bandwidth = last_level_cache_bytes(), decoding.bandwidth
    per_token = cache_bytes_per_token(session.contract)
    speeds = []
    for steps in decoding.steps:
        step = Timing.of(steps.durations_s)
        a_row = steps.context * per_token + source_bytes(session.contract, options.source_tokens)
        bytes_read = weights + options.batch_size * a_row
        bytes_per_s = bytes_read / step.median_s
        speed = DecodeSpeed(
            context=steps.context,
            capacity=steps.capacity,
            step=step,
            tokens_per_s=options.batch_size / step.median_s,
            bytes_read=bytes_read,
            bytes_per_s=bytes_per_s,
            bandwidth_share=None if bandwidth is None or bytes_read < cache_size else bytes_per_s / bandwidth,
        )
        speeds.append(speed)
    return tuple(speeds)
