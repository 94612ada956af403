from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Session
from kvgraph.runtime.trt import TrtSession, context_bucket

# The same graph over fewer slots, in float32: only the order of sums differs.
TOLERANCE = 1e-5
# float16 on a GPU against float16 on a CPU: products and sums are rounded in other places.
GPU_TOLERANCE = 0.05

OpenFake = Callable[..., Any]


@pytest.fixture(scope="session")
def bundle(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    return exported(tiny_llama(max_position_embeddings=256), dtype="float32")


def steps(session: Session, lengths: list[int], new_tokens: int, prompt: int) -> list[np.ndarray]:
    """Logits of a batch with rows of unequal length: a prefill padded to `prompt`, then decode steps."""
    random = np.random.default_rng(1)
    cache = session.allocate_cache(len(lengths))
    past = np.array(lengths)
    ids = random.integers(0, 97, (len(lengths), prompt))
    found = [session.prefill(cache, ids, np.zeros_like(past), past[:, None] - 1)]
    for _ in range(new_tokens):
        found.append(session.decode(cache, random.integers(0, 97, (len(lengths), 1)), past).copy())
        past = past + 1
    return [
        *found,
        *(
            cache.read(name)[:, :, : min(lengths)]
            for name in ("past_key_values.0.key", "past_key_values.1.value")
        ),
    ]


def assert_same(left: list[np.ndarray], right: list[np.ndarray]) -> None:
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        np.testing.assert_allclose(one, other, atol=TOLERANCE, err_msg=f"step {index}")


@pytest.mark.parametrize("engines", ["one", "two"])
def test_steps_are_those_of_onnx_runtime(bundle: Bundle, open_fake: OpenFake, engines: str) -> None:
    session, _, trt = open_fake(bundle, max_batch=3, max_context=128, prefill_chunk=64, engines=engines)
    assert trt.loaded == {"one": 1, "two": 2}[engines]
    # 60 + 10 tokens: decode passes from the bucket of 64 slots to that of 128.
    assert_same(steps(session, [60, 1, 7], 10, 60), steps(OrtSession(bundle), [60, 1, 7], 10, 60))


def test_decode_is_captured_once_a_bucket(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle, max_context=128, prefill_chunk=64)
    steps(session, [60], 10, 60)
    # One prefill and the first step of each bucket go through TensorRT, the other steps are launches.
    assert (gpu.executed, gpu.captured, gpu.launched) == (1 + 2, 2, 8)


def test_two_sequences_can_be_interleaved(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle, max_context=64)
    alone = [steps(session, [length], 3, length) for length in (5, 9)]
    caches = [session.allocate_cache(1) for _ in alone]
    randoms = [np.random.default_rng(1) for _ in alone]
    for index, length in enumerate((5, 9)):
        ids = randoms[index].integers(0, 97, (1, length))
        session.prefill(caches[index], ids, np.array([0]), np.array([[length - 1]]))
    for step in range(3):
        for index, length in enumerate((5, 9)):
            ids = randoms[index].integers(0, 97, (1, 1))
            logits = session.decode(caches[index], ids, np.array([length + step]))
            np.testing.assert_allclose(logits, alone[index][1 + step], atol=TOLERANCE)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 21])
def test_long_prompts_are_cut_into_chunks(bundle: Bundle, open_fake: OpenFake, length: int) -> None:
    session, _, _ = open_fake(bundle, max_batch=2, max_context=64, prefill_chunk=8)
    ids = np.random.default_rng(2).integers(0, 97, (2, length))
    positions = np.tile(np.arange(length), (2, 1))
    past = np.array([3, 0])
    expected = OrtSession(bundle)
    logits, reference = (
        one.prefill(one.allocate_cache(2), ids, past, positions) for one in (session, expected)
    )
    np.testing.assert_allclose(logits, reference, atol=TOLERANCE)


def test_rows_may_ask_for_tokens_of_different_chunks(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle, max_batch=3, max_context=64, prefill_chunk=8)
    ids = np.random.default_rng(3).integers(0, 97, (3, 20))
    positions = np.array([[0, 19, 8], [7, 3, 3], [15, 16, 19]])
    expected = OrtSession(bundle)
    logits, reference = (
        one.prefill(one.allocate_cache(3), ids, np.zeros(3, np.int64), positions)
        for one in (session, expected)
    )
    np.testing.assert_allclose(logits, reference, atol=TOLERANCE)


def test_a_rotary_base_of_the_total_length_is_kept_over_chunks(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], open_fake: OpenFake
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    bundle = exported(tiny_llama(max_position_embeddings=16, rope_parameters=rope), dtype="float32")
    session, _, _ = open_fake(bundle, max_batch=2, prefill_chunk=4)
    ids = np.random.default_rng(4).integers(0, 97, (2, 14))
    arguments = (ids, np.zeros(2, np.int64), np.array([[13], [5]]), np.array([14, 6]))
    expected = OrtSession(bundle)
    logits, reference = (one.prefill(one.allocate_cache(2), *arguments) for one in (session, expected))
    np.testing.assert_allclose(logits, reference, atol=TOLERANCE)


def test_strided_and_narrow_arrays_are_converted(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle, max_batch=2, max_context=64)
    ids = np.random.default_rng(6).integers(0, 97, (2, 12))
    past, positions = np.zeros(2, np.int64), np.array([[5], [3]])
    plain, strided = session.allocate_cache(2), session.allocate_cache(2)
    expected = session.prefill(plain, ids[:, ::2].copy(), past, positions)
    found = session.prefill(strided, ids[:, ::2], past.astype(np.int32), positions.astype(np.uint8))
    np.testing.assert_array_equal(found, expected)


def test_a_fresh_cache_is_zero_and_reset_makes_it_so(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle, max_context=64)
    cache = session.allocate_cache(1)
    assert not cache.read("past_key_values.1.key").any()
    session.prefill(cache, np.array([[1, 2]]), np.array([0]), np.array([[1]]))
    assert cache.read("past_key_values.1.key")[:, :, :2].all()
    cache.reset()
    assert not cache.read("past_key_values.1.key").any()


def test_memory_is_freed_with_its_owner(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle, max_context=64)
    before = len(gpu.memory)
    cache = session.allocate_cache(1)
    session.prefill(cache, np.array([[1, 2]]), np.array([0]), np.array([[1]]))
    session.decode(cache, np.array([[1]]), np.array([2]))
    del cache
    gc.collect()
    # Two graphs' logits, on the host and on the device.
    assert len(gpu.memory) - before == 4
    del session
    gc.collect()
    assert not gpu.memory


def test_logits_that_are_kept_stay_readable(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle, max_batch=2, max_context=64)
    kept = session.decode(session.allocate_cache(1), np.array([[1]]), np.array([0]))
    content = kept.copy()
    session.decode(session.allocate_cache(2), np.array([[1], [2]]), np.array([0, 0]))
    np.testing.assert_array_equal(kept, content)


def test_info_says_what_runs(bundle: Bundle, open_fake: OpenFake) -> None:
    info = open_fake(bundle)[0].info
    assert (info.runtime, info.device, info.dtype) == ("tensorrt-rtx", "cuda:0", "float32")
    assert info.subject == f"{bundle.path}, target tensorrt-rtx"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3,), "batch_size is 3, the engine takes 1 to 2; build with --max-batch"),
        ((1, 65), "1 to 64 slots a row"),
    ],
)
def test_caches_beyond_the_engine_are_refused(
    bundle: Bundle, open_fake: OpenFake, arguments: tuple[int, ...], message: str
) -> None:
    session, _, _ = open_fake(bundle, max_batch=2, max_context=64)
    with pytest.raises(ValueError, match=message):
        session.allocate_cache(*arguments)


def test_the_cache_of_another_session_is_refused(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle)
    with pytest.raises(ValueError, match="belongs to another session"):
        session.decode(OrtSession(bundle).allocate_cache(1), np.array([[1]]), np.array([0]))


def test_a_full_cache_is_refused_before_anything_runs(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle)
    with pytest.raises(ValueError, match="the cache allows 4"):
        session.decode(session.allocate_cache(1, 4), np.array([[1]]), np.array([4]))
    assert gpu.executed == 0


def test_an_engine_for_another_gpu_is_refused(bundle: Bundle, open_fake: OpenFake) -> None:
    with pytest.raises(ValueError, match="built for SM86, this GPU is SM89"):
        open_fake(bundle, compute_capabilities=(86,))


def test_what_tensorrt_refuses_is_said(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle)
    gpu.refuse = "past_length"
    message = (
        r"model\.engine, profile 0: TensorRT does not take shape \[1\] for 'past_length': it gives no reason"
    )
    with pytest.raises(RuntimeError, match=message):
        session.decode(session.allocate_cache(1), np.array([[1]]), np.array([0]))


def test_hidden_states_are_not_to_be_had(bundle: Bundle, open_fake: OpenFake) -> None:
    with pytest.raises(RuntimeError, match="an engine has no hidden states"):
        open_fake(bundle)[0].hidden_states()


def test_context_buckets_are_powers_of_two_within_the_capacity() -> None:
    assert [context_bucket(used, 300) for used in (1, 64, 65, 128, 129, 256, 257, 300)] == [
        64, 64, 128, 128, 256, 256, 300, 300,
    ]  # fmt: skip
    assert context_bucket(3, 16) == 16


@pytest.mark.gpu
@pytest.mark.parametrize("engines", ["one", "two"])
def test_an_engine_on_a_gpu_computes_what_onnx_runtime_does(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], engines: Any
) -> None:
    pytest.importorskip("cuda.bindings.runtime")
    bundle = exported(tiny_llama(max_position_embeddings=256, head_dim=64), dtype="float16")
    build_tensorrt(bundle, "tensorrt-rtx", TensorRTOptions(max_batch=3, max_context=128, engines=engines))
    found, expected = (steps(one, [60, 1, 7], 10, 60) for one in (TrtSession(bundle), OrtSession(bundle)))
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_allclose(left, right, atol=GPU_TOLERANCE)
