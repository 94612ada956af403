"""Engines of models with an encoder, run by a stand-in for TensorRT."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.runtime import open as runtime_open
from kvgraph.runtime.encoder_session import EncoderSession
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.ort_encoder import OrtEncoderSession
from kvgraph.runtime.sources import SourcedSession, encode_sources
from kvgraph.runtime.trt_encoder import TrtEncoderSession

# The same graph over fewer slots, in float32: only the order of sums differs.
TOLERANCE = 1e-5
VOCABULARY, SLOTS, MOST_SOURCE = 97, 128, 24
LENGTHS = [23, 1, 9]
CONFIGS: dict[str, dict[str, Any]] = {
    "t5": {
        "d_model": 20,
        "d_kv": 8,
        "d_ff": 44,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_ffn_dim": 44,
        "decoder_ffn_dim": 36,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_position_embeddings": SLOTS,
        "init_std": 0.3,
    },
}

OpenFake = Callable[..., Any]


@pytest.fixture(scope="module", params=CONFIGS)
def bundle(
    request: pytest.FixtureRequest,
    exported: Callable[..., Bundle],
    tmp_path_factory: pytest.TempPathFactory,
) -> Bundle:
    torch.manual_seed(7)
    config = AutoConfig.for_model(request.param, vocab_size=VOCABULARY, **CONFIGS[request.param])
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(path)
    return exported(path, dtype="float32")


@pytest.fixture
def session(bundle: Bundle, open_fake: OpenFake) -> TrtEncoderSession:
    opened = open_fake(bundle, max_batch=4, max_context=SLOTS, prefill_chunk=8, max_source=MOST_SOURCE)[0]
    assert isinstance(opened, TrtEncoderSession)
    return opened


def sources(seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, (len(LENGTHS), max(LENGTHS)))
    return ids, np.array(LENGTHS)


def steps(session: EncoderSession, rows: list[int] | None = None, decoded: int = 4) -> list[np.ndarray]:
    """Logits of rows of unequal length over sources of unequal length, and what the encoder gave."""
    encoded = session.encode(*sources())
    count = len(LENGTHS) if rows is None else len(rows)
    cache, past = session.allocate_cache(count), np.arange(1, count + 1) * 5
    session.attach(cache, encoded, None if rows is None else np.array(rows))
    random = np.random.default_rng(1)
    ids = random.integers(0, VOCABULARY, (count, int(past.max())))
    found = [session.prefill(cache, ids, np.zeros_like(past), past[:, None] - 1).copy()]
    for _ in range(decoded):
        found.append(session.decode(cache, random.integers(0, VOCABULARY, (count, 1)), past).copy())
        past = past + 1
    assert session.contract.encoder is not None
    return [*found, *(encoded.read(tensor.name) for tensor in session.contract.encoder.cross)]


@pytest.mark.parametrize("rows", [None, [2, 0, 2, 1], [1]], ids=["each its own", "shared", "one of three"])
def test_steps_are_those_of_onnx_runtime(
    bundle: Bundle, session: TrtEncoderSession, rows: list[int] | None
) -> None:
    for found, expected in zip(steps(session, rows), steps(OrtEncoderSession(bundle), rows), strict=True):
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_decode_is_captured_over_the_sources(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, trt = open_fake(bundle, max_batch=4, max_context=SLOTS, max_source=MOST_SOURCE)
    steps(session, decoded=6)
    # The encoder, one prefill and the first decode step go through TensorRT; the other steps are launches.
    assert (trt.loaded, gpu.executed, gpu.captured, gpu.launched) == (2, 3, 1, 5)


def test_other_sources_may_be_attached_to_a_cache_in_use(bundle: Bundle, session: TrtEncoderSession) -> None:
    logits = []
    for one in (session, OrtEncoderSession(bundle)):
        cache = one.allocate_cache(3)
        for seed in (3, 8):
            one.attach(cache, one.encode(*sources(seed)))
            for position in range(3):
                ids = np.full((3, 1), position + seed)
                logits.append(one.decode(cache, ids, np.full(3, position)).copy())
    for found, expected in zip(logits[:6], logits[6:], strict=True):
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert np.abs(logits[0] - logits[3]).max() > TOLERANCE


def test_beams_are_those_of_onnx_runtime(bundle: Bundle, session: TrtEncoderSession) -> None:
    params = GenerationParams(num_beams=2, max_new_tokens=10, eos_token_ids=(2, 30))
    prompts, texts = [[5, 6, 7], [40, 3, 3, 71, 9]], []
    for one in (session, OrtEncoderSession(bundle)):
        sourced = SourcedSession(one, encode_sources(one, prompts))
        texts.append([text.token_ids for text in generate(sourced, [[0], [0]], params)])
    assert texts[0] == texts[1]


def test_memory_is_freed_with_its_owner(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle, max_batch=4, max_source=MOST_SOURCE)
    before = len(gpu.memory)
    cache, encoded = session.allocate_cache(3), session.encode(*sources())
    session.attach(cache, encoded)
    kept = len(gpu.memory)
    del encoded
    gc.collect()
    # The cache still reads it.
    assert len(gpu.memory) == kept
    del cache
    gc.collect()
    assert len(gpu.memory) == before
    del session
    gc.collect()
    assert not gpu.memory


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5, 3), "5 sources, the engine takes 1 to 4 at once; build with --max-batch"),
        ((1, MOST_SOURCE + 1), f"25 tokens a row, the encoder takes {MOST_SOURCE}"),
    ],
)
def test_sources_beyond_the_engine_are_refused(
    session: TrtEncoderSession, shape: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        session.encode(np.ones(shape, np.int64), np.ones(shape[0], np.int64))


def test_what_belongs_to_another_session_is_refused(bundle: Bundle, session: TrtEncoderSession) -> None:
    other = OrtEncoderSession(bundle)
    with pytest.raises(ValueError, match="encoded by another session"):
        session.attach(session.allocate_cache(3), other.encode(*sources()))
    with pytest.raises(ValueError, match="the cache belongs to another session"):
        session.attach(other.allocate_cache(3), session.encode(*sources()))


def test_a_cache_without_sources_takes_part_in_no_step(session: TrtEncoderSession) -> None:
    with pytest.raises(ValueError, match="no sources; call encode, then attach"):
        session.decode(session.allocate_cache(1), np.array([[1]]), np.array([0]))


def test_commands_take_such_a_target(
    bundle: Bundle,
    session: TrtEncoderSession,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = runtime_open.open_session

    def open_session(opened: Bundle, target: str | None = None, *arguments: Any, **options: Any) -> Any:
        return session if target == "tensorrt-rtx" else plain(opened, target, *arguments, **options)

    monkeypatch.setattr(runtime_open, "open_session", open_session)
    monkeypatch.setattr("kvgraph.runtime.model.open_session", open_session)
    path = str(bundle.path)
    # Longer than the engine's sources and, with the steps, than its cache.
    sizes = ["--prefill", "30", "--steps", "200"]
    assert main(["compare", path, "--against", path, "--target", "tensorrt-rtx", *sizes]) == 0
    assert "cross tensors, in band" in capsys.readouterr().out
    texts = []
    for flags in (["--target", "tensorrt-rtx"], []):
        assert main(["run", path, "--token-ids", "5,6,7", "--max-new-tokens", "9", *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
