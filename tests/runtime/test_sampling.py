import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvgraph.runtime.sampling import (
    Sampler,
    SamplingParams,
    greedy,
    keep_candidates,
    log_probability,
    penalize_repetition,
)

V = 97
# transformers sums the probabilities in float32.
PROBABILITY_TOLERANCE = 1e-5


def random_logits(seed, size=V, scale=4.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def our_distribution(logits, params, history=()):
    if params.repetition_penalty != 1:
        seen = np.unique(np.array(history, np.int64))
        logits = penalize_repetition(logits, seen, params.repetition_penalty)
    token_ids, weights = keep_candidates(logits, params)
    probabilities = np.zeros(len(logits))
    probabilities[slice(None) if token_ids is None else token_ids] = weights / weights.sum(dtype=np.float64)
    return probabilities


def transformers_distribution(logits, params, history=()):
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    chain.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(MinPLogitsWarper(params.min_p))
    scores = chain(torch.tensor([list(history)], dtype=torch.int64), torch.from_numpy(logits)[None])
    return torch.softmax(scores.double(), -1)[0].numpy()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=penalty
        )
        for temperature in (1e-8, 0.7, 1, 3.0)
        for top_k in (0, 1, 5, V, V + 5)
        for top_p in (0.0, 1e-9, 0.5, 0.9, 1)
        for min_p, penalty in ((0.0, 1.0), (0.05, 1.3), (1.0, 0.8))
    ],
    ids=str,
)
def test_distribution_equals_that_of_transformers(params):
    for seed in range(3):
        logits, history = random_logits(seed), [1, 5, 5, 96, int(np.argmax(random_logits(seed)))]
        np.testing.assert_allclose(
            our_distribution(logits, params, history),
            transformers_distribution(logits, params, history),
            atol=PROBABILITY_TOLERANCE,
        )


@pytest.mark.parametrize("scale", [0.01, 8.0])
def test_nucleus_of_a_large_vocabulary_equals_that_of_transformers(scale):
    logits, params = random_logits(7, 5000, scale), SamplingParams(temperature=1.0, top_p=0.8)
    ours, theirs = our_distribution(logits, params), transformers_distribution(logits, params)
    assert abs(np.count_nonzero(ours) - np.count_nonzero(theirs)) <= 1
    np.testing.assert_allclose(ours, theirs, atol=5e-4)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.0, [1]), (0.5, [1, 2]), (0.51, [1, 2, 4]), (0.8, [0, 1, 2, 4])]
)
def test_of_equal_logits_the_first_are_kept(top_p, kept):
    # Probabilities 0.1, 0.25, 0.25, 0.1, 0.25 and 0.05.
    logits = np.log(np.array([0.1, 0.25, 0.25, 0.1, 0.25, 0.05])).astype(np.float32)
    token_ids, _ = keep_candidates(logits, SamplingParams(temperature=1.0, top_p=top_p))
    assert token_ids.tolist() == kept


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-45, 1e-8])
def test_tiny_temperature_takes_the_likeliest_without_overflow(temperature):
    logits = np.array([1e30, -1e30, 1.5e30, 0], np.float32)
    with np.errstate(all="raise"):
        token = Sampler(SamplingParams(temperature=temperature, seed=0), 4, [[0]]).sample(0, logits)
    assert token == 2


def test_drawn_tokens_follow_the_distribution():
    logits, draws = random_logits(3, 8, 1.0), 20000
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=5)
    sampler = Sampler(params, 8, [[0]])
    counts = np.bincount([sampler.sample(0, logits) for _ in range(draws)], minlength=8)
    expected = transformers_distribution(logits, params)
    assert not counts[expected == 0].any()
    # Five standard deviations of a share of 20000 draws.
    assert np.abs(counts / draws - expected).max() < 5 * 0.5 / math.sqrt(draws)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000])
def test_draw_from_a_large_vocabulary_is_the_inverse_of_the_running_sum(size):
    logits = random_logits(4, size)
    params = SamplingParams(temperature=1.0, seed=11)
    sampler, uniform = Sampler(params, size, [[0]]), np.random.default_rng(11)
    running = np.cumsum(np.exp(logits.astype(np.float64)))
    for _ in range(200):
        expected = np.searchsorted(running, uniform.random() * running[-1], side="right")
        assert sampler.sample(0, logits) == expected


def test_temperature_zero_is_argmax_and_the_first_of_equals():
    for seed in range(5):
        logits = random_logits(seed)
        assert Sampler(SamplingParams(), V, [[0]]).sample(0, logits) == torch.from_numpy(logits).argmax()
    assert greedy(np.array([0, 3, 3, 1], np.float32)) == 1


def test_masked_logits_are_never_drawn():
    logits = np.full(V, -np.inf, np.float32)
    logits[[3, 50]] = 1.0
    sampler = Sampler(SamplingParams(temperature=5.0, seed=1), V, [[0]])
    assert {sampler.sample(0, logits) for _ in range(50)} == {3, 50}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 40, V - 1])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, top_k=3, seed=0)], ids=str
)
def test_nan_and_infinite_logits_are_errors(bad, place, params):
    logits = random_logits(0)
    logits[place] = bad
    with pytest.raises(RuntimeError, match="largest logit is"):
        Sampler(params, V, [[0]]).sample(0, logits)


def test_logits_that_are_all_masked_are_an_error():
    with pytest.raises(RuntimeError, match="largest logit is -inf"):
        greedy(np.full(V, -np.inf, np.float32))


def test_greedy_choice_is_penalized_too():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), 4, [[0], [3]])
    logits = np.array([3.0, 2.0, 1.0, -1.0], np.float32)
    # Row 0: 3/2 falls behind 2, then 2/2 behind 3/2. Row 1 has seen neither.
    assert [sampler.sample(0, logits) for _ in range(3)] == [1, 0, 0]
    assert sampler.sample(1, logits) == 0
    assert logits.tolist() == [3.0, 2.0, 1.0, -1.0]


def test_a_row_does_not_depend_on_its_neighbours():
    logits = [random_logits(seed) for seed in range(10)]
    batch = Sampler(SamplingParams(temperature=2.0, seed=7), V, [[0]] * 3)
    drawn = [[batch.sample(row, step) for row in range(3)] for step in logits]
    for row in range(3):
        alone = Sampler(SamplingParams(temperature=2.0, seed=7 + row), V, [[0]])
        assert [alone.sample(0, step) for step in logits] == [tokens[row] for tokens in drawn]
    chosen = Sampler(SamplingParams(temperature=2.0, seed=(9, 8)), V, [[0]] * 2)
    alone = Sampler(SamplingParams(temperature=2.0, seed=8), V, [[0]])
    assert [chosen.sample(1, step) for step in logits] == [alone.sample(0, step) for step in logits]


def test_seeds_must_be_one_a_row():
    with pytest.raises(ValueError, match="2 seeds for 3 rows"):
        Sampler(SamplingParams(temperature=1.0, seed=(1, 2)), V, [[0]] * 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1e-9),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e31),
        ("seed", -1),
        ("seed", (1, -1)),
    ],
)
def test_values_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is .*, expected"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "1"), ("top_k", 1.0), ("top_p", None), ("seed", (1.5,)), ("top_k", True)],
)
def test_wrong_types_are_refused(field, value):
    with pytest.raises(TypeError, match=f"{field} is .*, expected"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("top", [0, 1, 5, V + 5])
def test_log_probabilities_equal_those_of_torch(top):
    logits = random_logits(2, scale=30.0)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    found = log_probability(logits, 11, top)
    assert found.logprob == pytest.approx(float(expected[11]), rel=1e-6)
    values, ids = expected.topk(min(top, V))
    assert [token for token, _ in found.top] == ids.tolist()
    assert [value for _, value in found.top] == pytest.approx(values.tolist(), rel=1e-6, abs=1e-6)
