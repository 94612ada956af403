"""A language model that can be worked out by hand, behind the session protocol."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers

from kvgraph.export.contract import Contract, scatter_state
from kvgraph.runtime.checks import check_step
from kvgraph.runtime.session import SessionInfo
from kvgraph.runtime.tokenizer import Tokenizer

V, LIMIT = 97, 64


def toy_next(tokens):
    """The likeliest token after `tokens`: depends on every one of them and on where it stands."""
    return sum((place + 3) * (token + 1) ** 2 for place, token in enumerate(tokens)) % V


def toy_logits(tokens):
    """Logits [V]: falling by 0.5 a token from the likeliest one on."""
    return -0.5 * ((np.arange(V) - toy_next(tokens)) % V).astype(np.float32)


class ToyCache:
    def __init__(self, batch_size, limit):
        self.batch_size, self.limit, self.capacity = batch_size, limit, limit
        # What was never written spoils every sum that it gets into.
        self.tokens = np.full((batch_size, limit), 10**6)

    def gather_rows(self, source, rows, start, stop):
        before = source.tokens.copy()
        for row, (origin, first, last) in enumerate(zip(rows, start, stop, strict=True)):
            self.tokens[row, first:last] = before[origin, first:last]


class ToySession:
    """Reads its tokens from the cache alone, and answers in one array that every call writes again."""

    info = SessionInfo("toy", "0", "cpu", "float32", "tests")

    def __init__(self, limit=LIMIT, takes_new_length=False):
        self.contract = Contract(V, 1, limit, takes_new_length, scatter_state([(2, 8)], "float32"))
        self.calls = []
        self._answer = np.empty(8 * 64 * V, np.float32)

    def allocate_cache(self, batch_size, limit=None):
        return ToyCache(batch_size, limit or self.contract.max_positions)

    def prefill(self, cache, input_ids, past_length, logit_positions, new_length=None):
        return self._run(cache, input_ids, past_length, logit_positions, new_length)

    def decode(self, cache, input_ids, past_length):
        return self._run(cache, input_ids, past_length, None, None)

    def _run(self, cache, input_ids, past_length, logit_positions, new_length):
        step = check_step(
            self.contract, cache.batch_size, cache.limit, input_ids, past_length, logit_positions, new_length
        )
        self.calls.append((step.input_ids.copy(), step.past_length.copy(), step.new_length))
        positions = np.zeros_like(step.input_ids[:, :1]) if logit_positions is None else step.logit_positions
        answer = self._answer[: positions.size * V].reshape(*positions.shape, V)
        for row, past in enumerate(step.past_length):
            cache.tokens[row, past : past + step.input_ids.shape[1]] = step.input_ids[row]
            for column, position in enumerate(positions[row]):
                answer[row, column] = toy_logits(cache.tokens[row, : past + position + 1].tolist())
        return answer


@pytest.fixture
def toy():
    return ToySession()


@pytest.fixture
def make_toy():
    return ToySession


@pytest.fixture
def letters():
    """A tokenizer with one printable character a token, id 0 = BOS (added to texts), id 1 = EOS."""
    words = {"<s>": 0, "</s>": 1, **{chr(31 + token): token for token in range(2, V)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(backend, bos_token_id=0, eos_token_ids=[1])
