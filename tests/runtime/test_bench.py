"""`kvgraph bench` against a session whose every call takes a known time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import Contract, scatter_state
from kvgraph.runtime.bench import bench, cache_bytes_per_token, weights_read
from kvgraph.runtime.bench_report import BenchOptions, BenchReport, Timing
from kvgraph.runtime.generate import stream
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.session import Cache, Floats, Ids, SessionInfo
from kvgraph.runtime.timed_session import TimedSession

LAYERS, HEADS, HEAD_DIM, VOCAB = 2, 3, 8, 97
CONTRACT = Contract(VOCAB, LAYERS, 64, False, scatter_state([(HEADS, HEAD_DIM)] * LAYERS, "float16"))
CACHE_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2
BANDWIDTH = 1e6
PREFILL_S, DECODE_S, SLOT_S, LOAD_S = 0.5, 0.25, 0.125, 4.0


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeCache:
    def __init__(self, batch_size: int, limit: int) -> None:
        self.batch_size, self.limit, self.capacity = batch_size, limit, limit

    def reserve(self, slots: int) -> None: ...

    def read(self, name: str) -> Floats:
        raise NotImplementedError

    def reset(self) -> None: ...


class FakeSession:
    """Takes PREFILL_S a call of prefill, and DECODE_S + SLOT_S a token in use for decode."""

    def __init__(self, clock: Clock, device: str = "cpu") -> None:
        clock.now += LOAD_S
        self.clock = clock
        self.contract = CONTRACT
        self.info = SessionInfo("fake", "1", device, "float16", "nowhere")
        self.seen: list[Ids] = []

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> FakeCache:
        return FakeCache(batch_size, limit or 64)

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        self.clock.now += PREFILL_S
        self.seen.append(input_ids)
        return np.zeros((*logit_positions.shape, VOCAB), np.float32)

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        self.clock.now += DECODE_S + SLOT_S * (past_length.max() + 1)
        self.seen.append(input_ids)
        return np.zeros((len(input_ids), 1, VOCAB), np.float32)

    def hidden_states(self) -> tuple[Floats, ...]:
        return (np.ones(1, np.float32),)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr("kvgraph.runtime.bench.read_bandwidth", lambda threads: BANDWIDTH)
    monkeypatch.setattr("kvgraph.runtime.bench.last_level_cache_bytes", lambda: 0)
    return clock


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """A bundle without graphs: a head of 10 numbers, tables of 97 * 20 tokens and 7 * 20 positions, 2 bytes each."""
    shapes = {"lm_head": 10, "model.embed_tokens": (97, 20), "model.embed_positions": (7, 20)}
    weights = {f"{name}.weight": np.ones(shape, np.float16) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    return Bundle(
        path=tmp_path,
        schema_version=1,
        tool_version="0",
        model_type="llama",
        config={"tie_word_embeddings": False},
        dtype="float16",
        residual_dtype="float16",
        contract=CONTRACT,
        recipe=None,
        source={},
        weights={},
        files={},
        versions={},
    )


Measure = Callable[..., BenchReport]


@pytest.fixture
def measure(bundle: Bundle, clock: Clock) -> Measure:
    return lambda **options: bench(bundle, lambda: FakeSession(clock), BenchOptions(**options))


def test_load_time_is_that_of_opening(measure: Measure) -> None:
    assert measure(prompt_tokens=4, new_tokens=2).load_s == LOAD_S


def test_prefill_counts_the_tokens_of_all_rows_and_chunks(measure: Measure) -> None:
    report = measure(prompt_tokens=10, new_tokens=2, batch_size=3, prefill_chunk=4)
    assert report.prefill == Timing(3 * PREFILL_S, 3 * PREFILL_S, 3 * PREFILL_S, 3)
    assert report.prefill_tokens_per_s == 3 * 10 / (3 * PREFILL_S)
    assert report.time_to_first_token.median_s == report.first_run_s == 3 * PREFILL_S


def test_decode_is_timed_with_exactly_so_many_tokens_in_use(measure: Measure) -> None:
    report = measure(prompt_tokens=4, new_tokens=5, contexts=(1, 7, 64), batch_size=2, runs=2)
    assert [speed.context for speed in report.decode] == [1, 7, 64]
    for speed in report.decode:
        step_s = DECODE_S + SLOT_S * speed.context
        assert speed.step == Timing(step_s, step_s, step_s, 2 * 5)
        assert speed.tokens_per_s == 2 / step_s


def test_cache_is_filled_with_tokens_before_decode_is_timed(bundle: Bundle, clock: Clock) -> None:
    session = FakeSession(clock)
    options = BenchOptions(prompt_tokens=4, new_tokens=2, contexts=(31,), prefill_chunk=16, runs=1)
    bench(bundle, lambda: session, options)
    # Two generations, the first to warm up, then 30 tokens and the steps.
    assert [ids.shape[1] for ids in session.seen if ids.shape[1] > 1] == [4, 4, 16, 14]


def test_decode_is_timed_at_the_length_of_the_prompt_by_default(measure: Measure) -> None:
    assert [speed.context for speed in measure(prompt_tokens=9, new_tokens=2).decode] == [9]


def test_bandwidth_share_follows_from_the_bytes_of_weights_and_cache(measure: Measure) -> None:
    (speed,) = measure(prompt_tokens=4, new_tokens=2, contexts=(7,), batch_size=3).decode
    assert speed.bytes_read == 10 * 2 + 3 * 7 * CACHE_BYTES
    assert speed.bytes_per_s == speed.bytes_read / (DECODE_S + SLOT_S * 7)
    assert speed.bandwidth_share == speed.bytes_per_s / BANDWIDTH


def test_there_is_no_share_of_bandwidth_where_a_cache_holds_what_a_step_reads(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_bytes = 10 * 2 + 7 * CACHE_BYTES
    monkeypatch.setattr("kvgraph.runtime.bench.last_level_cache_bytes", lambda: cache_bytes)
    report = measure(prompt_tokens=4, new_tokens=2, contexts=(6, 7))
    assert [speed.bandwidth_share is None for speed in report.decode] == [True, False]
    assert report.memory_bandwidth_bytes_per_s == BANDWIDTH


def test_bandwidth_of_the_host_says_nothing_of_a_gpu(bundle: Bundle, clock: Clock) -> None:
    options = BenchOptions(prompt_tokens=4, new_tokens=2)
    report = bench(bundle, lambda: FakeSession(clock, "cuda:0"), options)
    assert report.memory_bandwidth_bytes_per_s is None
    assert report.decode[0].bandwidth_share is None


@pytest.mark.parametrize(("tied", "numbers"), [(True, 97 * 20 + 10), (False, 10)])
def test_embedding_table_is_read_only_where_it_is_the_head(bundle: Bundle, tied: bool, numbers: int) -> None:
    assert weights_read(replace(bundle, config={"tie_word_embeddings": tied})) == 2 * numbers


def write_target(folder: Path, sizes: dict[str, int]) -> None:
    """A weights file of the ort-cpu target, of tensors of so many bytes."""
    header: dict[str, Any] = {"__metadata__": {}}
    end = 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    target = folder / "targets" / "ort-cpu"
    target.mkdir(parents=True)
    text = json.dumps(header).encode()
    (target / "weights.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)


def test_weights_of_prefill_alone_are_not_read(bundle: Bundle, tmp_path: Path) -> None:
    table = "model.embed_tokens.weight/packed"
    write_target(
        tmp_path, {f"prefill.{table}": 640, f"decode.{table}": 320, "decode.lm_head.weight/packed": 64}
    )
    tied, untied = (
        replace(bundle, path=tmp_path, config={"tie_word_embeddings": tied}) for tied in (True, False)
    )
    assert weights_read(tied, "ort-cpu") == 320 + 64
    assert weights_read(untied, "ort-cpu") == 64


@pytest.mark.parametrize(("batch_size", "experts"), [(1, 2), (3, 6), (5, 8)])
def test_experts_that_no_row_chooses_are_not_read(
    bundle: Bundle, tmp_path: Path, batch_size: int, experts: int
) -> None:
    names = ("model.layers.0.mlp.experts.gate_proj.weight", "model.layers.0.mlp.shared_expert.up_proj.weight")
    write_target(tmp_path, {names[0]: 8 * 100, names[1]: 30})
    config = {"tie_word_embeddings": False, "num_experts": 8, "num_experts_per_tok": 2}
    found = weights_read(replace(bundle, path=tmp_path, config=config), "ort-cpu", batch_size)
    assert found == experts * 100 + 30


def test_cache_bytes_are_those_of_all_layers() -> None:
    assert cache_bytes_per_token(CONTRACT) == CACHE_BYTES


def test_token_ids_are_valid_and_the_same_for_the_same_seed(bundle: Bundle, clock: Clock) -> None:
    def seen(seed: int) -> Ids:
        session = FakeSession(clock)
        bench(bundle, lambda: session, BenchOptions(prompt_tokens=30, new_tokens=2, seed=seed))
        assert all(((ids >= 0) & (ids < VOCAB)).all() for ids in session.seen)
        return session.seen[0]

    assert (seen(1) == seen(1)).all()
    assert (seen(1) != seen(2)).any()


def test_loop_overhead_is_counted_at_every_step_but_the_first(measure: Measure) -> None:
    report = measure(prompt_tokens=4, new_tokens=6, runs=2)
    assert report.loop_overhead == Timing(0.0, 0.0, 0.0, 2 * 5)


def test_gap_is_the_time_between_the_calls_of_a_session(clock: Clock) -> None:
    session = TimedSession(FakeSession(clock))
    cache, ids, past = session.allocate_cache(1), np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    session.prefill(cache, ids, past, ids)
    for gap in (0.5, 2.0):
        clock.now += gap
        session.decode(cache, ids, past)
    assert session.gaps_s() == [0.5, 2.0]
    assert [call.duration_s for call in session.calls] == [PREFILL_S, DECODE_S + SLOT_S, DECODE_S + SLOT_S]


def test_loop_takes_less_than_a_millisecond_a_step_at_a_large_vocabulary() -> None:
    logits = np.random.default_rng(0).standard_normal((1, 1, 128256)).astype(np.float32)

    class LargeVocabulary(FakeSession):
        def prefill(self, *arguments: Any) -> Floats:
            return logits

        def decode(self, *arguments: Any) -> Floats:
            return logits

    inner = LargeVocabulary(Clock())
    inner.contract = replace(CONTRACT, vocab_size=128256)
    session = TimedSession(inner)
    params = GenerationParams(max_new_tokens=60, eos_token_ids=())
    assert sum(1 for _ in stream(session, [np.array([5])], params)) == 60
    assert Timing.of(session.gaps_s()).median_s < 1e-3


def test_timed_session_is_the_session_in_all_else(clock: Clock) -> None:
    inner = FakeSession(clock)
    session = TimedSession(inner)
    assert (session.contract, session.info) == (inner.contract, inner.info)
    assert session.allocate_cache(2, 5).limit == 5
    assert (session.hidden_states()[0] == inner.hidden_states()[0]).all()


def test_timing_is_median_fastest_and_slowest() -> None:
    assert Timing.of([3.0, 1.0, 9.0, 2.0]) == Timing(2.5, 1.0, 9.0, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"new_tokens": 1}, "new_tokens is 1, expected 2"),
        ({"runs": 0}, "runs is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"limit": 65, "prompt_tokens": 4}, "limit is 65, expected 1 to 64"),
        ({"contexts": (0,), "prompt_tokens": 4}, "context is 0, expected 1 to 64"),
        ({"contexts": (8, 65), "prompt_tokens": 4}, "context is 65, expected 1 to 64"),
        ({"prompt_tokens": 60, "new_tokens": 5}, "prompt_tokens 60 and new_tokens 5 exceed the 64 slots"),
    ],
)
def test_size_out_of_range_is_refused(measure: Measure, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(**{"new_tokens": 2, **options})
