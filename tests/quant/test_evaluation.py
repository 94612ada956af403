"""Figures of what quantization costs, against their formulas and against the reference of a real model."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import Contract, scatter_state
from kvgraph.quant.evaluation import EvaluationText, evaluate, evaluate_bundle, read_evaluation_text
from kvgraph.quant.plan import parse_plan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.report import format_quantization
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.perplexity import measure_perplexity
from kvgraph.runtime.session import Cache, Floats, Ids, SessionInfo

VOCAB = 5
# Figures of the shared README: windows of 255 tokens, each after BOS.
WINDOW, PERPLEXITY = 255, 6.762


class TableSession:
    """Logits by the last token alone: a row of a table for each token; notes which graph was asked."""

    def __init__(self, table: Floats) -> None:
        self.table = table
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.contract = Contract(VOCAB, 1, 64, False, scatter_state([(1, 2)], "float32"))
        self.info = SessionInfo("table", "1", "cpu", "float32", "test")

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> Cache:
        return None  # type: ignore[return-value]  # nothing is kept

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        self.calls.append(("prefill", input_ids.shape))
        return self.table[np.take_along_axis(input_ids, logit_positions, axis=1)]

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        self.calls.append(("decode", input_ids.shape))
        return self.table[input_ids]


def tables() -> tuple[Floats, Floats]:
    generator = np.random.default_rng(1)
    reference = generator.standard_normal((VOCAB, VOCAB)).astype(np.float32) * 2
    return reference, reference + generator.standard_normal((VOCAB, VOCAB)).astype(np.float32)


def softmax(logits: Floats) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64))
    return powers / powers.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("prefill", [7, 3, 1])
def test_figures_are_those_of_their_formulas(prefill: int) -> None:
    text = np.random.default_rng(2).integers(0, VOCAB, 30).tolist()
    reference, candidate = tables()
    found = evaluate(
        TableSession(reference), TableSession(candidate), EvaluationText("", text, 0), 7, prefill
    )
    windows = [[0, *text[at : at + 7]] for at in range(0, 30, 7)]
    pairs = [pair for window in windows for pair in itertools.pairwise(window)]
    p, q = softmax(reference), softmax(candidate)
    divergence = [(p[last] * np.log(p[last] / q[last])).sum() for last, _ in pairs]
    assert found.tokens == len(pairs) == 30
    assert found.windows == 5
    assert found.reference_perplexity == pytest.approx(
        np.exp(-np.mean([np.log(p[last, after]) for last, after in pairs]))
    )
    assert found.perplexity == pytest.approx(
        np.exp(-np.mean([np.log(q[last, after]) for last, after in pairs]))
    )
    assert found.kl_mean == pytest.approx(np.mean(divergence))
    assert found.kl_max == pytest.approx(max(divergence))
    same = [reference[last].argmax() == candidate[last].argmax() for last, _ in pairs]
    assert found.top1_agreement == pytest.approx(np.mean(same))


def test_part_of_every_window_goes_through_decode() -> None:
    session = TableSession(tables()[0])
    evaluate(session, session, EvaluationText("", list(range(5)) * 3, 0), 8, 5)
    # Two windows, of 8 and 7 tokens, twice: as reference and as candidate.
    assert session.calls == [("prefill", (2, 5))] * 2 + [("decode", (2, 1))] * 6


def test_without_bos_the_first_token_of_a_window_is_not_scored() -> None:
    session = TableSession(tables()[0])
    assert evaluate(session, session, EvaluationText("", [1, 2, 3, 4, 0], None), 4, 4).tokens == 3


def test_logits_that_are_not_finite_give_null_in_json() -> None:
    reference, candidate = tables()
    found = evaluate(
        TableSession(reference), TableSession(candidate * np.nan), EvaluationText("", [1, 2], 0), 4, 4
    )
    assert found.to_json()["perplexity"] is None
    assert found.to_json()["reference_perplexity"] == found.reference_perplexity


@pytest.fixture(scope="module")
def story(shared_data: Path) -> Path:
    return shared_data / "text" / "tinystories_sample_en.txt"


def test_int8_keeps_the_perplexity_of_a_real_model(
    stories: Bundle, story: Path, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    text = read_evaluation_text(story, stories)
    sessions = [OrtSession(bundle, threads=1) for bundle in (stories, quantized(stories, "int8-wo"))]
    found = evaluate(*sessions, text, WINDOW, WINDOW)
    assert found.reference_perplexity == pytest.approx(PERPLEXITY, abs=5e-4)
    assert found.perplexity == pytest.approx(PERPLEXITY, rel=5e-3)
    assert found.top1_agreement > 0.97
    assert found.kl_mean < 3e-3
    other = measure_perplexity(sessions[1], text.token_ids, WINDOW, text.bos_token_id)
    assert other.perplexity == pytest.approx(found.perplexity, rel=1e-6)


def test_evaluation_is_written_and_shown(stories: Bundle, story: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(story.read_text(encoding="utf-8")[:600], encoding="utf-8")
    plan = parse_plan("prefill=int8-dynamic,decode=nvfp4-wo")
    bundle = quantize_bundle(stories, plan, tmp_path / "out", evaluation=short)
    assert bundle.quantization is not None
    assert (
        bundle.quantization["evaluation"]
        == evaluate_bundle(stories, bundle, read_evaluation_text(short, stories)).to_json()
    )
    # The recipes differ, so half of the window is decoded.
    assert (bundle.quantization["evaluation"]["prefill"], bundle.quantization["evaluation"]["window"]) == (
        256,
        512,
    )
    text = format_quantization(bundle)
    assert "through prefill, the rest through decode" in text
    assert "top-1 agreement" in text


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff\xfe\xfa", "not UTF-8 text"), (b"", "0 tokens, too few to score one")]
)
def test_text_that_cannot_be_scored_is_an_error(
    stories: Bundle, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_evaluation_text(tmp_path / "text", stories)
