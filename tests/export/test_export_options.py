"""What the graphs of each choice of `kvgraph export` compute, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

TOLERANCE = 1e-4
# float16 keeps 11 bits of every product's result, on logits of up to 5.
FLOAT16_TOLERANCE = 0.03

CAPACITY = 48
LAYERS = 2


@pytest.mark.parametrize("residual_dtype", ["float16", "float32"])
def test_float16_graphs_follow_transformers_in_float32(
    residual_dtype: str,
    tiny_llama: Callable[..., Path],
    exported: Callable[..., Bundle],
    ort: Callable[..., OrtSession],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids = random_ids(2, 16)
    session = ort(exported(tiny_llama(), dtype="float16", residual_dtype=residual_dtype))
    found = teacher_forced(session, ids, [10, 1, 1, 4])
    np.testing.assert_allclose(found, reference_logits(tiny_llama(), ids), atol=FLOAT16_TOLERANCE, rtol=0)


@pytest.fixture
def fixed(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle], ort: Callable[..., OrtSession]
) -> OrtSession:
    return ort(exported(tiny_llama(), capacity=CAPACITY, debug_outputs=True), debug_outputs=True)


def test_graphs_of_a_fixed_capacity_compute_the_same(
    fixed: OrtSession,
    tiny_llama: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids = random_ids(2, CAPACITY)
    found = teacher_forced(fixed, ids, [30, 1, 1, 15, 1])
    np.testing.assert_allclose(found, reference_logits(tiny_llama(), ids), atol=TOLERANCE, rtol=0)


def test_cache_of_a_fixed_capacity_has_that_many_slots_and_no_more(
    fixed: OrtSession, random_ids: Callable[..., Ids]
) -> None:
    cache = fixed.allocate_cache(1)
    assert (cache.capacity, cache.limit, fixed.contract.capacity) == (CAPACITY, CAPACITY, CAPACITY)
    with pytest.raises(ValueError, match="the cache allows 48"):
        fixed.decode(cache, random_ids(1, 1), np.array([CAPACITY]))


def test_debug_outputs_equal_the_hidden_states_of_transformers(
    fixed: OrtSession,
    tiny_llama: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference: Callable[[Path], Any],
) -> None:
    ids, model = random_ids(2, 9), reference(tiny_llama())
    fixed.prefill(fixed.allocate_cache(2), ids, np.zeros(2, np.int64), np.zeros((2, 1), np.int64))
    found = fixed.hidden_states()
    wanted = [
        state.numpy() for state in model(torch.from_numpy(ids), output_hidden_states=True).hidden_states
    ]
    for layer in range(LAYERS):
        np.testing.assert_allclose(found[layer], wanted[layer], atol=TOLERANCE, rtol=0)
    # The last of transformers is behind the final norm.
    last = model.model.norm(torch.from_numpy(found[LAYERS])).numpy()
    np.testing.assert_allclose(last, wanted[LAYERS], atol=TOLERANCE, rtol=0)
