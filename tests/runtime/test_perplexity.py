from __future__ import annotations

import math

import numpy as np
import pytest

from kvgraph import cli
from kvgraph.runtime import perplexity
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.perplexity import measure_perplexity
from kvgraph.runtime.tokenizer import Tokenizer

V, BOS = 97, 0


def toy_surprise(history, token):
    """What the toy model of conftest.py pays for a token: logits fall by 0.5 from the likeliest one on."""
    likeliest = sum((place + 3) * (one + 1) ** 2 for place, one in enumerate(history)) % V
    return 0.5 * ((token - likeliest) % V) + math.log(sum(math.exp(-0.5 * rank) for rank in range(V)))


def by_hand(tokens, window, bos):
    prefix = [] if bos is None else [bos]
    surprises = []
    for start in range(0, len(tokens), window):
        text = [*prefix, *tokens[start : start + window]]
        surprises += [toy_surprise(text[:at], text[at]) for at in range(1, len(text))]
    return math.exp(sum(surprises) / len(surprises)), len(surprises)


@pytest.fixture
def tokens():
    return np.random.default_rng(1).integers(0, V, 103).tolist()


@pytest.mark.parametrize("bos", [BOS, None])
@pytest.mark.parametrize("window", [2, 7, 51, 64])
def test_every_window_is_scored_alone_after_bos(toy, tokens, window, bos):
    found = measure_perplexity(toy, tokens, window, bos)
    expected, count = by_hand(tokens, window, bos)
    assert found.perplexity == pytest.approx(expected, rel=1e-6)
    assert found.tokens == count
    assert found.window == window


def test_windows_in_chunks_give_the_same_figure(toy, tokens, monkeypatch):
    expected = measure_perplexity(toy, tokens, 40, BOS)
    monkeypatch.setattr(perplexity, "_CALL_VALUES", 2 * 16 * V)
    toy.calls.clear()
    assert measure_perplexity(toy, tokens, 40, BOS) == expected
    assert max(ids.shape[1] for ids, _, _ in toy.calls) < 40


def test_several_windows_share_a_call(toy, tokens):
    measure_perplexity(toy, tokens, 10, BOS)
    # 11 windows, 8 of them at once.
    assert [ids.shape for ids, _, _ in toy.calls] == [(8, 10), (3, 10)]


def test_each_row_tells_its_own_length_to_a_rope_that_depends_on_it(make_toy, tokens):
    toy = make_toy(takes_new_length=True)
    measure_perplexity(toy, tokens[:15], 10, BOS)
    assert [new_length.tolist() for _, _, new_length in toy.calls] == [[10, 5]]


@pytest.mark.parametrize(("window", "bos"), [(0, BOS), (1, None), (65, BOS)])
def test_a_window_that_does_not_fit_is_refused(toy, tokens, window, bos):
    with pytest.raises(ValueError, match=rf"window is {window} tokens, expected [12] to 64"):
        measure_perplexity(toy, tokens, window, bos)


@pytest.mark.parametrize(("count", "bos"), [(0, BOS), (1, None)])
def test_a_text_without_a_token_to_score_is_refused(toy, tokens, count, bos):
    with pytest.raises(ValueError, match=f"the text has {count} tokens"):
        measure_perplexity(toy, tokens[:count], 8, bos)


def test_logits_that_are_no_numbers_are_an_error(toy, tokens, monkeypatch):
    run = toy.prefill
    monkeypatch.setattr(toy, "prefill", lambda *inputs: run(*inputs) * np.nan)
    with pytest.raises(ValueError, match=r"not finite; kvgraph compare --layers"):
        measure_perplexity(toy, tokens, 8, BOS)


class TestStories:
    """stories260k: 6.762 in the data folder's README, measured there without this project."""

    @pytest.fixture
    def bundle(self, shared_data, exported):
        return exported(shared_data / "stories260k")

    @pytest.fixture
    def text(self, shared_data):
        return shared_data / "text" / "tinystories_sample_en.txt"

    def test_the_figure_is_the_published_one(self, bundle, text):
        token_ids = Tokenizer.load(bundle.path, bundle.config).encode(text.read_text("utf-8"), False)
        found = measure_perplexity(OrtSession(bundle, threads=1), token_ids, 255, 1)
        assert found.perplexity == pytest.approx(6.762, abs=0.001)
        assert found.tokens == len(token_ids)

    def test_the_command_prints_the_figure_and_the_count(self, bundle, text, capsys):
        assert cli.main(["perplexity", str(bundle.path), "--text", str(text), "--window", "255"]) == 0
        assert capsys.readouterr().out.startswith(
            f"perplexity 6.762 over 1882 tokens in 8 windows of 255 after BOS ({bundle.path}: onnxruntime "
        )

    @pytest.mark.parametrize(
        ("content", "message"), [(b"", "the text is empty"), (b"\xff\xfe", "not UTF-8 text")]
    )
    def test_a_text_that_cannot_be_scored_is_bad_input(self, bundle, tmp_path, capsys, content, message):
        (tmp_path / "text").write_bytes(content)
        assert cli.main(["perplexity", str(bundle.path), "--text", str(tmp_path / "text")]) == 2
        assert message in capsys.readouterr().err

    def test_a_byte_order_mark_is_no_text(self, bundle, text, tmp_path, capsys):
        (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + text.read_bytes())
        assert (
            cli.main(["perplexity", str(bundle.path), "--text", str(tmp_path / "text"), "--window", "255"])
            == 0
        )
        assert "6.762 over 1882 tokens" in capsys.readouterr().out
