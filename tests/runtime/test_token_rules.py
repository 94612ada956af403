"""Forced and forbidden tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraph.runtime.token_rules import TokenRules, read_token_rules

V = 7
LOGITS = np.arange(V, dtype=np.float32)


def test_without_rules_scores_stay() -> None:
    assert np.array_equal(TokenRules().apply(LOGITS, 0, 1), LOGITS)


@pytest.mark.parametrize(("index", "most", "chosen"), [(0, 5, 2), (1, 5, 5), (4, 5, 3), (0, 1, 3)], ids=str)
def test_first_and_last_are_forced_and_others_are_not(index: int, most: int, chosen: int) -> None:
    rules, before = TokenRules(first=2, last=3, forbidden=(6,)), LOGITS.copy()
    scores = rules.apply(LOGITS, index, most)
    assert int(scores.argmax()) == chosen
    assert np.array_equal(LOGITS, before)
    assert scores[6] == -np.inf


def test_generation_config_goes_before_the_model_config() -> None:
    model = {"forced_bos_token_id": 1, "forced_eos_token_id": 2}
    assert read_token_rules({}, model, V) == TokenRules(1, 2)
    generation = {"forced_eos_token_id": [3], "bad_words_ids": [[4], [5]], "suppress_tokens": [5, 6]}
    assert read_token_rules(generation, model, V) == TokenRules(None, 3, (5, 6, 4))


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"bad_words_ids": [[1, 2]]}, "a word of several tokens"),
        ({"bad_words_ids": [1]}, "expected lists of token ids"),
        ({"begin_suppress_tokens": [1]}, "begin_suppress_tokens is .* not implemented"),
        ({"suppress_tokens": [V]}, f"names token {V}"),
        ({"forced_bos_token_id": "a"}, "expected a token id"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(generation: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_token_rules(generation, {}, V)
