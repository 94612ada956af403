"""Feeding prompts of different lengths, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvgraph.runtime.session import Cache, Floats, Ids, Session


def prefill_prompts(
    session: Session,
    cache: Cache,
    prompts: Sequence[Ids],
    past_length: Ids,
    prefill_chunk: int | None = None,
) -> Floats:
    """Feed what the cache does not hold yet and return the logits [B, V] of each row's last token.

    The array may be the session's own: it is valid until the session's next call.

    Args:
        session: Runs the prefill graph.
        cache: One row a prompt, with room for a token more than each.
        prompts: All token ids of each row.
        past_length: [B], how many of them the cache holds; fewer than there are.
        prefill_chunk: Most tokens a row in one call; bounds the S x S memory of a long prompt.
    """
    past = past_length.copy()
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    logits: Floats | None = None
    while (rest := lengths - past).any():
        # A row that is done sits idle at its own length, where the padding must fit as well.
        width = min(int(rest.max()), cache.limit - int(past.max()), prefill_chunk or cache.limit)
        taken = np.minimum(rest, width)
        input_ids = np.zeros((len(prompts), width), np.int64)
        for row, prompt in enumerate(prompts):
            input_ids[row, : taken[row]] = prompt[past[row] : past[row] + taken[row]]
        last = np.maximum(taken - 1, 0)[:, None]
        step = session.prefill(cache, input_ids, past, last, np.maximum(rest, 1))[:, 0]
        past += taken
        done = (taken == rest) & (taken > 0)
        if done.all():
            return step
        if logits is None:
            logits = np.empty(step.shape, np.float32)
        logits[done] = step[done]
    if logits is None:
        raise ValueError("the cache holds every token already; feed the last one again to get its logits")
    return logits
