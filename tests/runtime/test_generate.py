import time

import numpy as np
import pytest
import torch

from kvgraph.export.contract import Contract, scatter_state
from kvgraph.runtime.generate import generate, stream
from kvgraph.runtime.generation import GenerationParams, collect
from kvgraph.runtime.sampling import SamplingParams

V, LIMIT = 97, 64
PROMPTS = [[5], [7, 8, 9], [4, 90, 3, 21, 60]]


def logits_of(tokens):
    """The formula of the toy model, written again: a sum over every token and its place."""
    likeliest = sum((place + 3) * (token + 1) ** 2 for place, token in enumerate(tokens)) % V
    return np.array([-0.5 * ((token - likeliest) % V) for token in range(V)], np.float32)


def greedy(prompt, count):
    """The likeliest tokens after a prompt, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(logits_of(tokens))))
    return tokens[len(prompt) :]


def test_rows_of_different_lengths_equal_the_formula(toy):
    results = generate(toy, PROMPTS, GenerationParams(max_new_tokens=10))
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert list(result.token_ids) == greedy(prompt, 10)
        assert result.finish_reason == "length"
        assert result.text == ""


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 100])
def test_chunked_prefill_changes_nothing(toy, chunk):
    results = generate(toy, PROMPTS, GenerationParams(max_new_tokens=6, prefill_chunk=chunk))
    assert [list(result.token_ids) for result in results] == [greedy(prompt, 6) for prompt in PROMPTS]
    widths = [ids.shape[1] for ids, _, _ in toy.calls]
    assert widths[: -(-5 // chunk)] == [min(chunk, 5 - start) for start in range(0, 5, chunk)]


@pytest.mark.parametrize("chunk", [None, 2])
def test_new_length_is_the_rest_of_each_prompt(make_toy, chunk):
    session = make_toy(takes_new_length=True)
    generate(session, PROMPTS, GenerationParams(max_new_tokens=1, prefill_chunk=chunk))
    rest = [[1, 3, 5]] if chunk is None else [[1, 3, 5], [1, 1, 3], [1, 1, 1]]
    assert [new_length.tolist() for _, _, new_length in session.calls] == rest


def test_rows_end_at_their_own_eos_and_the_others_go_on(toy, letters):
    expected = [greedy(prompt, 20) for prompt in PROMPTS]
    ends = (expected[0][3], expected[2][0])  # row 2 ends with its first token
    params = GenerationParams(max_new_tokens=20, eos_token_ids=ends)
    results = generate(toy, PROMPTS, params, letters)
    for tokens, result in zip(expected, results, strict=True):
        end = next((place for place, token in enumerate(tokens) if token in ends), None)
        assert list(result.token_ids) == tokens[: None if end is None else end + 1]
        assert result.finish_reason == ("length" if end is None else "eos")
        assert result.text == letters.decode(tokens[:end])
    assert results[2].text == ""
    # After the longest row has ended nothing more is computed.
    assert len(toy.calls) == max(len(result.token_ids) for result in results)


def test_eos_of_the_tokenizer_is_the_default(toy, letters):
    prompt = [5]
    tokens = greedy(prompt, 10)
    letters.eos_token_ids = (tokens[4], tokens[7])
    (result,) = generate(toy, [prompt], GenerationParams(max_new_tokens=10), letters)
    assert list(result.token_ids) == tokens[:5]
    (result,) = generate(toy, [prompt], GenerationParams(max_new_tokens=10, eos_token_ids=()), letters)
    assert list(result.token_ids) == tokens


def test_parked_row_keeps_its_own_length(toy):
    ends = (greedy(PROMPTS[1], 1)[0],)
    generate(toy, PROMPTS, GenerationParams(max_new_tokens=5, eos_token_ids=ends))
    assert [past[1] for _, past, _ in toy.calls[1:]] == [3, 3, 3, 3]


@pytest.mark.parametrize(("length", "new"), [(1, 63), (63, 1), (64, 0), (60, 4)])
def test_prompt_and_new_tokens_may_fill_the_cache(toy, length, new):
    prompt = [3] * length
    (result,) = generate(toy, [prompt], GenerationParams(max_new_tokens=new))
    assert list(result.token_ids) == greedy(prompt, new)
    assert result.finish_reason == "length"


@pytest.mark.parametrize(("length", "new"), [(65, 0), (64, 1), (64, None), (60, 5)])
def test_prompt_and_new_tokens_beyond_the_cache_are_refused_before_compute(toy, length, new):
    total = length + (1 if new is None else new)
    with pytest.raises(ValueError, match=rf"row 1: {length} prompt .* make {total}, the cache allows 64"):
        stream(toy, [[1], [3] * length], GenerationParams(max_new_tokens=new))
    assert toy.calls == []


def test_full_cache_stops_cleanly(make_toy):
    session = make_toy(limit=8)
    (result,) = generate(session, [[1, 2, 3, 4, 5]], GenerationParams())
    assert list(result.token_ids) == greedy([1, 2, 3, 4, 5], 3)
    assert result.finish_reason == "length"


def test_rows_fill_the_cache_each_at_its_own_step(make_toy):
    results = generate(make_toy(limit=8), PROMPTS, GenerationParams())
    assert [list(result.token_ids) for result in results] == [greedy(p, 8 - len(p)) for p in PROMPTS]


def test_no_new_tokens_is_an_empty_result_and_no_work(toy, letters):
    results = generate(toy, PROMPTS, GenerationParams(max_new_tokens=0), letters)
    assert [(result.token_ids, result.text, result.finish_reason) for result in results] == [
        ((), "", "length")
    ] * 3
    assert toy.calls == []


def test_empty_prompt_begins_with_bos_or_is_refused(toy, letters):
    (result,) = generate(toy, [[]], GenerationParams(max_new_tokens=4), letters)
    assert list(result.token_ids) == greedy([0], 4)
    letters.bos_token_id = None
    for tokenizer in (letters, None):
        with pytest.raises(ValueError, match="prompt 1 has no tokens, and there is no BOS"):
            stream(toy, [[1], []], GenerationParams(), tokenizer)


@pytest.mark.parametrize("bad", [-1, V, 2**40])
def test_token_out_of_range_is_refused_before_compute(toy, bad):
    with pytest.raises(ValueError, match=rf"prompt 0: token 4 is {bad}, expected 0 <= id < {V}"):
        stream(toy, [[1, 2, 3, 4, bad]], GenerationParams(prefill_chunk=2))


def test_prompts_of_other_types_are_refused(toy):
    with pytest.raises(TypeError, match="prompt 0 is of float64"):
        stream(toy, [[1.0]], GenerationParams())
    with pytest.raises(ValueError, match=r"prompt 0 has shape \[1, 2\]"):
        stream(toy, [[[1, 2]]], GenerationParams())
    with pytest.raises(ValueError, match="no prompts"):
        stream(toy, [], GenerationParams())
    assert generate(toy, [np.arange(8, dtype=np.int32)[::2]], GenerationParams(max_new_tokens=1))


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": -1}, {"logprobs": -1}, {"prefill_chunk": 0}, {"prefill_chunk": -5}]
)
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        GenerationParams(**wrong)


def test_two_streams_over_one_session_do_not_disturb_each_other(toy):
    params = GenerationParams(max_new_tokens=12)
    first, second = stream(toy, PROMPTS, params), stream(toy, PROMPTS[::-1], params)
    pairs = list(zip(first, second, strict=True))
    for events, prompts in zip(zip(*pairs, strict=True), (PROMPTS, PROMPTS[::-1]), strict=True):
        results = collect(events, 3)
        assert [list(result.token_ids) for result in results] == [greedy(prompt, 12) for prompt in prompts]


def test_cache_is_used_again_and_only_new_tokens_are_fed(toy):
    cache = toy.allocate_cache(1)
    params = GenerationParams(max_new_tokens=5)
    first = [event.token_id for event in stream(toy, [[5, 6, 7]], params, cache=cache)]
    toy.calls.clear()
    # The last token was never fed. The conversation goes on from the third of those made, with two new tokens.
    prompt = [5, 6, 7, *first[:3], 40, 41]
    again = [event.token_id for event in stream(toy, [prompt], params, cache=cache, past_length=[6])]
    assert again == greedy(prompt, 5)
    assert toy.calls[0][0].tolist() == [[40, 41]]


def test_rows_of_a_used_cache_may_hold_different_lengths(toy):
    cache = toy.allocate_cache(3)
    params = GenerationParams(max_new_tokens=1)
    prompts = [[5, 6, 7, 8], [9], [1, 2]]
    list(stream(toy, prompts, params, cache=cache))
    longer = [[5, 6, 7, 8, 9, 10], [9, 8, 7, 6, 5, 4], [1, 2, 3]]
    for chunk in (None, 1, 2, 3):
        params = GenerationParams(max_new_tokens=4, prefill_chunk=chunk)
        results = collect(stream(toy, longer, params, cache=cache, past_length=[4, 1, 2]), 3)
        assert [list(result.token_ids) for result in results] == [greedy(prompt, 4) for prompt in longer]


@pytest.mark.parametrize("past", [-1, 3, 4])
def test_wrong_past_length_is_refused(toy, past):
    with pytest.raises(ValueError, match=rf"past_length\[0\] is {past}, expected"):
        stream(toy, [[1, 2, 3]], GenerationParams(), cache=toy.allocate_cache(1), past_length=[past])


def texts_of(toy, letters, prompt, *, eos_token_ids=(), **options):
    params = GenerationParams(eos_token_ids=eos_token_ids, **options)
    events = list(stream(toy, [letters.encode(prompt)], params, letters))
    (result,) = collect(events, 1)
    assert "".join(event.text for event in events) == result.text
    return result


def test_stop_string_ends_the_text_across_tokens(toy, letters):
    whole = texts_of(toy, letters, "story", max_new_tokens=30).text
    assert len(whole) == 30
    stop = whole[10:14]
    result = texts_of(toy, letters, "story", max_new_tokens=30, stop=(stop,))
    assert result.finish_reason == "stop"
    assert result.text == whole[: whole.index(stop)]
    assert letters.decode(result.token_ids) == result.text + stop


def test_shorter_of_two_stops_wins_where_one_begins_the_other(toy, letters):
    whole = texts_of(toy, letters, "story", max_new_tokens=30).text
    for stop in ((whole[5:7], whole[5:9]), (whole[5:9], whole[5:7])):
        result = texts_of(toy, letters, "story", max_new_tokens=30, stop=stop)
        assert result.text == whole[:5]
        assert len(result.token_ids) == 7


def test_stop_string_in_the_prompt_is_ignored(toy, letters):
    whole = texts_of(toy, letters, "story", max_new_tokens=5).text
    assert "ry" not in whole
    # The prompt's end and the first new character together would be one too.
    result = texts_of(toy, letters, "story", max_new_tokens=5, stop=("ry", "y" + whole[0]))
    assert (result.text, result.finish_reason) == (whole, "length")


def test_text_held_back_for_a_stop_comes_out_at_the_end(toy, letters):
    whole = texts_of(toy, letters, "story", max_new_tokens=10).text
    result = texts_of(toy, letters, "story", max_new_tokens=10, stop=(whole[7:] + "?!",))
    assert result.text == whole
    end = letters.encode(whole, add_special_tokens=False)[9]
    result = texts_of(toy, letters, "story", stop=(whole[7:9] + "?!",), eos_token_ids=(end,))
    assert result.finish_reason == "eos"
    assert result.text == whole[: whole.index(whole[9])]


def test_stop_strings_without_a_tokenizer_are_refused(toy):
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        stream(toy, [[1]], GenerationParams(stop="a"))


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_those_of_the_model_itself(toy, top):
    sampling = SamplingParams(temperature=2.0, top_k=5, seed=3)
    params = GenerationParams(max_new_tokens=6, logprobs=top, sampling=sampling)
    for prompt, result in zip(PROMPTS, generate(toy, PROMPTS, params), strict=True):
        tokens = list(prompt)
        assert [logprob.token_id for logprob in result.logprobs] == list(result.token_ids)
        for logprob in result.logprobs:
            expected = torch.log_softmax(torch.from_numpy(logits_of(tokens)), -1)
            assert logprob.logprob == pytest.approx(float(expected[logprob.token_id]), abs=1e-5)
            assert [token for token, _ in logprob.top] == expected.topk(top).indices.tolist()
            tokens.append(logprob.token_id)


def test_sampled_row_does_not_depend_on_its_neighbours(toy):
    def sampled(prompts, seed):
        sampling = SamplingParams(temperature=3.0, repetition_penalty=1.2, seed=seed)
        return generate(toy, prompts, GenerationParams(max_new_tokens=15, sampling=sampling))

    batch = sampled(PROMPTS, 10)
    assert [sampled([prompt], 10 + row)[0] for row, prompt in enumerate(PROMPTS)] == batch
    assert sampled(PROMPTS[::-1], (12, 11, 10))[::-1] == batch
    assert sampled([PROMPTS[0]], 11) != [batch[0]]


class IdleSession:
    """Takes no time: what is left is the loop."""

    def __init__(self, batch_size, vocab_size):
        self.contract = Contract(vocab_size, 1, 4096, False, scatter_state([(2, 8)], "float32"))
        self._logits = (
            np.random.default_rng(0).standard_normal((batch_size, 1, vocab_size)).astype(np.float32)
        )

    def allocate_cache(self, batch_size, limit=None):
        return type("Cache", (), {"batch_size": batch_size, "limit": 4096})

    def prefill(self, cache, input_ids, past_length, logit_positions, new_length=None):
        return self._logits

    def decode(self, cache, input_ids, past_length):
        return self._logits


def test_a_step_of_the_loop_costs_less_than_a_millisecond(letters):
    events = stream(IdleSession(1, 128256), [[1]], GenerationParams(), letters)
    durations = []
    for _ in range(100):
        start = time.perf_counter()
        next(events)
        durations.append(time.perf_counter() - start)
    # The median: other work on the machine is not the loop's.
    assert sorted(durations)[50] < 1e-3
