"""Beam search against `transformers`, whose beams are the definition."""

import itertools
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.beam import Beams, largest, log_softmax
from kvgraph.runtime.generate import generate, stream
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.model import load
from kvgraph.runtime.sampling import SamplingParams

STORIES = Path(__file__).parents[1] / "tiny_model" / "model"
EARLY_STOPPING = [False, True, "never"]
PROMPTS = [[5], [7, 8, 9], [4, 90, 3, 21, 60]]
PROMPTS_OF_3 = [[7, 8, 9], [4, 90, 3], [60, 1, 17]]
PAD = 0
# Relative, of sums of log-probabilities in float32.
SCORE_TOLERANCE = 1e-5


class Oracle:
    """`generate` of transformers. Prompts of other lengths go alone: padding has no part in their best texts."""

    def __init__(self, checkpoint):
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def best(self, prompts, eos, max_new_tokens, **options):
        """Tokens and score of each prompt's best text."""
        if len({len(prompt) for prompt in prompts}) > 1:
            return [self.best([prompt], eos, max_new_tokens, **options)[0] for prompt in prompts]
        ids = torch.tensor(prompts)
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            eos_token_id=list(eos) or None,
            pad_token_id=PAD,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        texts = []
        for tokens in result.sequences[:, ids.shape[1] :].tolist():
            end = next((place + 1 for place, token in enumerate(tokens) if token in eos), len(tokens))
            texts.append(tokens[:end])
        return list(zip(texts, result.sequences_scores.tolist(), strict=True))


@pytest.fixture(scope="module")
def tiny(tiny_llama, exported):
    return load(exported(tiny_llama()).path), Oracle(tiny_llama())


@pytest.fixture(scope="module")
def stories(exported):
    return load(exported(STORIES).path), Oracle(STORIES)


def check_prompts(pair, prompts, eos, new_tokens, **options):
    """Generate for all prompts at once, compare each with the oracle, and give what was found."""
    model, oracle = pair
    found = model.generate(prompts, eos_token_ids=eos, max_new_tokens=new_tokens, **options)
    expected = oracle.best(prompts, eos, new_tokens, **options)
    for generation, (tokens, score) in zip(found, expected, strict=True):
        assert list(generation.token_ids) == tokens, (eos, options)
        assert generation.score == pytest.approx(score, rel=SCORE_TOLERANCE), (eos, options)
        assert generation.finish_reason == ("eos" if tokens[-1] in eos else "length")
    return found


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("num_beams", [2, 3, 5])
def test_texts_are_those_of_transformers(tiny, num_beams, early_stopping):
    lengths = set()
    for length_penalty in (-1.5, 0.0, 1.0, 2.0):
        options = {
            "num_beams": num_beams,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
        }
        for eos in ((), (2, 7, 30), tuple(range(16))):
            found = check_prompts(tiny, PROMPTS_OF_3, eos, 12, **options)
            lengths |= {len(generation.token_ids) for generation in found}
    # Some end at once, some later, some never.
    assert {1, 12} < lengths


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
def test_stories_are_those_of_transformers(stories, early_stopping):
    model, _ = stories
    prompts = model.encode(["Once upon a time", "One sunny day, Lily", "The"])
    ends = (*model.eos_token_ids, *model.tokenizer.encode(".", add_special_tokens=False)[-1:])
    for num_beams, length_penalty, eos in ((2, 1.0, ends), (3, 0.6, ends[:1]), (5, 2.0, ends)):
        options = {"num_beams": num_beams, "length_penalty": length_penalty}
        found = check_prompts(stories, prompts, eos, 40, early_stopping=early_stopping, **options)
        for generation in found:
            shown = [token for token in generation.token_ids if token not in eos]
            assert generation.text.strip() == model.tokenizer.decode(shown).strip()


def test_repetition_penalty_is_that_of_transformers(tiny):
    for penalty in (1.3, 0.7):
        check_prompts(tiny, PROMPTS, (2, 7), 20, num_beams=3, repetition_penalty=penalty)


def test_beams_fill_the_cache_to_its_last_slot(tiny):
    model, oracle = tiny
    prompts = [[5], [3] * 58]
    found = model.generate(prompts, eos_token_ids=(), num_beams=3)
    for prompt, generation in zip(prompts, found, strict=True):
        (expected,) = oracle.best([prompt], (), 64 - len(prompt), num_beams=3)
        assert list(generation.token_ids) == expected[0]
        assert len(prompt) + len(generation.token_ids) == 64


def test_chunked_prefill_changes_nothing(tiny):
    model, _ = tiny
    whole = model.generate(PROMPTS, num_beams=3, max_new_tokens=10)
    assert model.generate(PROMPTS, num_beams=3, max_new_tokens=10, prefill_chunk=2) == whole


def test_torch_session_has_beams_too(tiny, tiny_llama):
    model, _ = tiny
    checkpoint = open_checkpoint(tiny_llama())
    params = GenerationParams(num_beams=4, max_new_tokens=12, eos_token_ids=(2, 7))
    found = generate(TorchSession.open(checkpoint), PROMPTS, params)
    expected = generate(model.session, PROMPTS, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_one_beam_is_the_greedy_text(tiny):
    model, _ = tiny
    greedy = model.generate(PROMPTS, max_new_tokens=10)
    assert model.generate(PROMPTS, max_new_tokens=10, num_beams=1, length_penalty=3.0) == greedy


# The toy's distribution: see conftest. Its best text is found by trying every one.


def toy_scores(tokens):
    likeliest = sum((place + 3) * (token + 1) ** 2 for place, token in enumerate(tokens)) % 97
    logits = -0.5 * ((np.arange(97) - likeliest) % 97)
    return logits - math.log(np.exp(logits).sum())


def test_beams_as_wide_as_three_steps_find_the_best_text_of_all(toy):
    prompt = [4, 90, 3]
    texts = {}
    for tokens in itertools.product(range(97), repeat=2):
        first = toy_scores(prompt)[tokens[0]]
        if first > -14:
            score = first + toy_scores([*prompt, tokens[0]])[tokens[1]]
            texts[tokens] = score / 2
    params = GenerationParams(num_beams=40, max_new_tokens=2)
    (found,) = generate(toy, [prompt], params)
    assert found.token_ids == max(texts, key=texts.__getitem__)
    assert found.score == pytest.approx(max(texts.values()), rel=SCORE_TOLERANCE)


def test_prompts_are_prefilled_once_and_their_rows_are_spread(toy):
    generate(toy, PROMPTS, GenerationParams(num_beams=4, max_new_tokens=5))
    assert [ids.shape for ids, _, _ in toy.calls] == [(3, 5), *[(12, 1)] * 4]
    assert [past.tolist() for _, past, _ in toy.calls[1:]] == [
        [1 + step] * 4 + [3 + step] * 4 + [5 + step] * 4 for step in range(4)
    ]


def test_one_token_needs_no_beams_in_the_cache(toy):
    (found,) = generate(toy, [[5]], GenerationParams(num_beams=4, max_new_tokens=1))
    assert found.token_ids == (int(np.argmax(toy_scores([5]))),)
    assert len(toy.calls) == 1


def test_no_new_tokens_are_an_empty_text(toy):
    (found,) = generate(toy, [[5]], GenerationParams(num_beams=4, max_new_tokens=0))
    assert (found.token_ids, found.finish_reason, toy.calls) == ((), "length", [])


def test_only_what_differs_is_copied(make_toy, monkeypatch):
    toy = make_toy()
    copied = []
    cache_type = type(toy.allocate_cache(1))
    gather_rows = cache_type.gather_rows

    def gather(self, source, rows, start, stop):
        moved = np.asarray(rows) != np.arange(len(rows)) if source is self else np.ones(len(rows), bool)
        assert source is not self or not set(np.flatnonzero(moved)) & set(np.asarray(rows)[moved])
        copied.append((np.asarray(stop) - start)[moved].tolist())
        gather_rows(self, source, rows, start, stop)

    monkeypatch.setattr(cache_type, "gather_rows", gather)
    generate(toy, [list(range(1, 31))], GenerationParams(num_beams=3, max_new_tokens=10))
    assert copied[0] == [30, 30, 30]
    # No row of the prompt is copied again, and none onto a row that another beam needs.
    assert any(copied[1:])
    assert all(slots < 10 for step in copied[1:] for slots in step)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_beams": 0}, ValueError, "num_beams is 0, expected 1 or more"),
        ({"num_beams": 2.0}, TypeError, "num_beams is 2.0, expected an integer"),
        ({"length_penalty": math.nan}, ValueError, "length_penalty is nan, expected a finite number"),
        ({"length_penalty": "1"}, TypeError, "length_penalty is '1', expected a number"),
        ({"early_stopping": "always"}, ValueError, "early_stopping is 'always', expected True, False or"),
        ({"early_stopping": 1}, ValueError, "early_stopping is 1, expected True, False or 'never'"),
        ({"num_beams": 3, "stop": "a"}, ValueError, "stop does not go with num_beams = 3"),
        ({"num_beams": 3, "logprobs": 0}, ValueError, "logprobs does not go with num_beams = 3"),
        (
            {"num_beams": 3, "sampling": SamplingParams(temperature=0.5)},
            ValueError,
            "temperature does not go with num_beams = 3: tokens are not drawn",
        ),
    ],
)
def test_what_does_not_go_with_beams_is_refused_by_name(options, error, message):
    with pytest.raises(error, match=message):
        GenerationParams(**options)


def test_beams_are_not_streamed(toy):
    with pytest.raises(ValueError, match=r"num_beams is 3: .* use generate"):
        stream(toy, [[1]], GenerationParams(num_beams=3))


def test_what_the_model_has_no_room_for_is_refused_before_compute(toy):
    for prompt, options, message in (
        ([1], {"num_beams": 49}, "num_beams is 49 with 0 end tokens, .* 98 different tokens .* of 97"),
        ([1], {"num_beams": 2, "length_penalty": -40.0}, "length_penalty is -40.0: 63 new tokens"),
        ([1] * 60, {"num_beams": 2, "max_new_tokens": 5}, "row 0: 60 prompt tokens and 5 new ones make 65"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(toy, [prompt], GenerationParams(**options))
    assert toy.calls == []


def test_logits_that_are_no_numbers_are_an_error():
    with pytest.raises(RuntimeError, match="largest logit is nan"):
        log_softmax(np.array([[1.0, 2.0], [np.nan, 0.0]], np.float32))


def test_tokens_that_cannot_come_finish_no_text():
    beams = Beams(np.array([1]), 5, GenerationParams(num_beams=3, early_stopping=True), (0, 1, 2), 97)
    logits = np.full((1, 97), -np.inf, np.float32)
    logits[0, 50] = 0
    beams.advance(logits)
    assert (beams.finished, beams.done, beams.tokens[0].tolist()) == ([], False, [50])


@pytest.mark.parametrize("size", [3, 512, 513, 5000, 30000])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_largest_are_those_of_a_stable_sort(size, count):
    values = np.random.default_rng(size).integers(0, size // 3 + 1, size).astype(np.float32)
    np.testing.assert_array_equal(largest(values, count), np.argsort(-values, kind="stable")[:count])


def test_log_probabilities_are_those_of_torch():
    logits = 10 * np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    np.testing.assert_allclose(log_softmax(logits), torch.from_numpy(logits).log_softmax(-1), atol=1e-5)


def test_a_step_of_beams_over_a_large_vocabulary_costs_milliseconds():
    params = GenerationParams(num_beams=4)
    beams = Beams(np.array([1]), 1000, params, (), 32000)
    logits = np.random.default_rng(0).standard_normal((4, 32000)).astype(np.float32)
    beams.advance(logits[:1])
    durations = []
    for _ in range(30):
        start = time.perf_counter()
        beams.advance(logits)
        durations.append(time.perf_counter() - start)
    # Measured 0.6 ms. The median: other work on the machine is not the search's.
    assert sorted(durations)[15] < 10e-3
