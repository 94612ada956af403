"""Which tokens a model's generation settings force or forbid, whatever its logits.

Encoder-decoder models rely on them: a translator is told its target language by a forced first token, and Marian's
padding, whose logit nothing was trained on, must never be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvgraph.runtime.session import Floats

# Settings of generation_config.json that force or forbid tokens in ways that are not implemented.
_UNKNOWN = ("begin_suppress_tokens", "force_words_ids", "sequence_bias")


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What is forced and what is forbidden.

    Attributes:
        first: The first token, if it is forced.
        last: The token at the greatest length, if it is forced.
        forbidden: Tokens that are never chosen.
    """

    first: int | None = None
    last: int | None = None
    forbidden: tuple[int, ...] = ()

    def apply(self, scores: Floats, index: int, most: int) -> Floats:
        """Logits or log-probabilities [..., V] of new token number `index` of at most `most`, as the rules leave them.

        What is not to be chosen becomes -infinity, a forced token 0. The scores themselves are left as they are.
        """
        forced = self.last if index == most - 1 and self.last is not None else None
        if forced is None and index == 0:
            forced = self.first
        if forced is not None:
            scores = np.full_like(scores, -np.inf)
            scores[..., forced] = 0
        elif self.forbidden:
            scores = scores.copy()
            scores[..., list(self.forbidden)] = -np.inf
        return scores


def read_token_rules(generation: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int) -> TokenRules:
    """The rules of a bundle.

    Args:
        generation: generation_config.json, empty where there is none.
        config: The model's configuration, which says what that file would where there is none.
        vocab_size: V.

    Raises:
        ValueError: A setting is malformed or not implemented.
    """
    for key in _UNKNOWN:
        if generation.get(key):
            raise ValueError(
                f"generation_config.json: {key} is {generation[key]!r}, which is not implemented; remove it"
            )
    source = generation or config
    forbidden = [*_ids(generation, "suppress_tokens"), *_bad_words(generation)]
    forced = [_ids(source, key)[:1] for key in ("forced_bos_token_id", "forced_eos_token_id")]
    for token in (*forbidden, *forced[0], *forced[1]):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"generation_config.json names token {token}, expected 0 <= id < {vocab_size}, the vocabulary"
            )
    first, last = (tokens[0] if tokens else None for tokens in forced)
    return TokenRules(first, last, tuple(dict.fromkeys(forbidden)))


def _bad_words(generation: Mapping[str, Any]) -> list[int]:
    words = generation.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) and word for word in words):
        raise ValueError(f"generation_config.json: bad_words_ids is {words!r}, expected lists of token ids")
    if long := [word for word in words if len(word) > 1]:
        raise ValueError(
            f"generation_config.json: bad_words_ids holds {long[0]}, a word of several tokens, which is not "
            "implemented; remove it"
        )
    return [token for word in words for token in _ids({"bad_words_ids": word}, "bad_words_ids")]


def _ids(source: Mapping[str, Any], key: str) -> list[int]:
    value = source.get(key)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ValueError(f"generation_config.json: {key} is {value!r}, expected a token id")
    return list(ids)
