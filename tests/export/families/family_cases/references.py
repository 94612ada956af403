"""What the logits and caches of a case are: from transformers, or from the formulas of a textbook model."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

from family_cases import formulas
from family_cases.case import LENGTH, PADDING, VOCABULARY, Case
from family_cases.checkpoints import model_class
from kvgraph.export.contract import cross_key, cross_value, past_key, past_value
from kvgraph.runtime.session import Floats, Ids

# The tokens of sources that are padded together; the longest is longer than T5's largest distance.
SOURCE_LENGTHS = np.array([23, 1, 9, 14])
# Every reference reads these ids, or some of the first of their rows.
ROWS = len(SOURCE_LENGTHS)


class Answer(NamedTuple):
    """What a step leaves.

    Attributes:
        logits: [B, n, V].
        states: Name of a cache or cross tensor -> its valid part [K, n or C, D], for each row.
    """

    logits: Floats
    states: dict[str, list[Any]]


def token_ids(case: Case) -> Ids:
    """[ROWS, LENGTH] of the text's vocabulary."""
    vocab_size = case.config.get("decoder_vocab_size", VOCABULARY)
    return without_padding(np.random.default_rng(5).integers(0, vocab_size, (ROWS, LENGTH)))


def source_ids(case: Case) -> Ids:
    """[ROWS, C] with padding that is no padding token."""
    vocab_size = case.config.get("source_vocab_size", VOCABULARY)
    return without_padding(np.random.default_rng(3).integers(0, vocab_size, (ROWS, SOURCE_LENGTHS.max())))


def without_padding(ids: Ids) -> Ids:
    """The same without `PADDING`."""
    return np.where(ids == PADDING, PADDING + 1, ids)


class Reference:
    """What runs the checkpoint of a case, each question once."""

    def __init__(self, case: Case, checkpoint: Path) -> None:
        self.case = case
        self.checkpoint = checkpoint
        self.ids = token_ids(case)
        self._answers: dict[tuple[Any, ...], Answer] = {}

    def answer(self, sizes: Sequence[int] = (LENGTH,), rows: slice = slice(0, ROWS)) -> Answer:
        """What is right for the first tokens of some rows, fed in chunks of `sizes`."""
        key = (tuple(sizes), rows.start, rows.stop)
        if key not in self._answers:
            run = self._formulas if self.case.is_textbook else self._transformers
            self._answers[key] = run(self.ids[rows, : sum(sizes)], sizes)
        return self._answers[key]

    def half_precision(self, dtype: str) -> Floats:
        """Logits of transformers in another type, all at once."""
        model = load(self.checkpoint, getattr(torch, dtype))
        return ask(model, self.case, self.ids, [LENGTH])[0].logits

    def _formulas(self, ids: Ids, sizes: Sequence[int]) -> Answer:
        file, config = self.checkpoint / "model.safetensors", self.case.config
        weights = {name: x.astype(np.float64) for name, x in safetensors.numpy.load_file(file).items()}
        if "encoder_layers" in config:
            sources = zip(source_ids(self.case), SOURCE_LENGTHS, strict=True)
            run: Callable[..., Any] = functools.partial(formulas.transformer, weights)
            results = [run(s[:n], row, config) for (s, n), row in zip(sources, ids, strict=False)]
        else:
            results = [formulas.decoder(weights, row, config) for row in ids]
        names = results[0][1]
        return Answer(
            np.stack([logits for logits, _ in results]),
            {name: [states[name] for _, states in results] for name in names},
        )

    def _transformers(self, ids: Ids, sizes: Sequence[int]) -> Answer:
        answer, cache = ask(load(self.checkpoint, torch.float32), self.case, ids, sizes)
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        states = dict(named(own, past_key, past_value))
        if isinstance(cache, EncoderDecoderCache):
            for name, rows in named(cache.cross_attention_cache, cross_key, cross_value):
                states[name] = [row[:, :n] for row, n in zip(rows, SOURCE_LENGTHS, strict=True)]
        return Answer(answer.logits, states)


def named(
    cache: DynamicCache, key: Callable[[int], str], value: Callable[[int], str]
) -> Iterable[tuple[str, list[Any]]]:
    """The rows of every tensor of a cache by its name in the contract."""
    for layer, stored in enumerate(cache.layers):
        yield key(layer), list(stored.keys.float().numpy())
        yield value(layer), list(stored.values.float().numpy())


@functools.lru_cache(maxsize=4)
def load(checkpoint: Path, dtype: torch.dtype) -> PreTrainedModel:
    """A checkpoint as transformers loads it."""
    config = json.loads((checkpoint / "config.json").read_text())
    # Eagerly, transformers 5.24 adds Falcon's ALiBi bias twice; "sdpa" is what it takes for that family by itself.
    attention = "sdpa" if config["model_type"] == "falcon" else "eager"
    model = model_class(config).from_pretrained(checkpoint, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def ask(
    model: PreTrainedModel, case: Case, ids: Ids, sizes: Sequence[int]
) -> tuple[Answer, DynamicCache | EncoderDecoderCache]:
    """Logits of transformers at every position of ids, fed in chunks, and its cache."""
    cache: Any = DynamicCache()
    arguments: dict[str, Any] = {}
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        mask = np.arange(SOURCE_LENGTHS.max()) < SOURCE_LENGTHS[:, None]
        arguments["input_ids"] = torch.from_numpy(source_ids(case))
        arguments["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
    else:
        # A dynamic rope keeps the frequencies of its longest call until a short one comes.
        model(torch.zeros(1, 1, dtype=torch.int64))
    own = "decoder_input_ids" if arguments else "input_ids"
    parts, start = [], 0
    for size in sizes:
        chunk = torch.from_numpy(ids[:, start : start + size])
        with warnings.catch_warnings():
            # The cache's keyword is renamed in the middle of version 5.
            warnings.simplefilter("ignore", FutureWarning)
            parts.append(model(**arguments, **{own: chunk}, past_key_values=cache).logits)
        start += size
    return Answer(torch.cat(parts, dim=1).float().numpy(), {}), cache
