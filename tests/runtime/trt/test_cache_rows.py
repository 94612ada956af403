from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.trt import TrtSession

OpenFake = Callable[..., Any]
SLOTS = 64


@pytest.fixture(scope="module")
def bundle(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    return exported(tiny_llama(), dtype="float32")


def filled(session: TrtSession, rows: int) -> Any:
    cache = session.allocate_cache(rows)
    ids = np.random.default_rng(rows).integers(0, 97, (rows, 9))
    session.prefill(cache, ids, np.zeros(rows, np.int64), np.zeros((rows, 1), np.int64))
    return cache


@pytest.mark.parametrize(
    ("rows", "start", "stop"),
    [([0, 0, 0], [0, 3, 0], [9, 9, 2]), ([1, 0, 2], [2, 0, 0], [9, 5, 9]), ([2, 0, 1], [0, 4, 3], [7, 9, 3])],
)
@pytest.mark.parametrize("own", [True, False])
def test_rows_are_copied_on_the_device(
    bundle: Bundle, open_fake: OpenFake, own: bool, rows: list[int], start: list[int], stop: list[int]
) -> None:
    session, gpu, _ = open_fake(bundle, max_batch=4, max_context=SLOTS)
    cache = filled(session, 3)
    source = cache if own else filled(session, 4)
    names = [tensor.name for tensor in session.contract.state]
    before = {name: (cache.read(name), source.read(name)) for name in names}
    cache.gather_rows(source, np.array(rows), np.array(start), np.array(stop))
    for name, (expected, origin) in before.items():
        wanted = expected.copy()
        for row, (taken, first, last) in enumerate(zip(rows, start, stop, strict=True)):
            wanted[row, :, first:last] = origin[taken, :, first:last]
        np.testing.assert_array_equal(cache.read(name), wanted)
    assert gpu.copied > 0


def test_only_the_slots_that_are_asked_for_are_copied(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle, max_batch=3, max_context=SLOTS)
    cache = filled(session, 3)
    cache.gather_rows(cache, np.array([0, 0, 2]), np.array([0, 5, 0]), np.array([9, 9, 9]))
    # Four slots of one row: 2 layers, keys and values, 2 heads of 8 float32 each.
    assert gpu.copied == 4 * 2 * 2 * 2 * 8 * 4


def test_beams_are_those_of_onnx_runtime(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle, max_batch=6, max_context=SLOTS)
    params = GenerationParams(num_beams=3, max_new_tokens=12, eos_token_ids=(2, 7, 30))
    prompts = [[7, 8, 9], [4, 90, 3, 21, 60]]
    found, expected = (generate(one, prompts, params) for one in (session, OrtSession(bundle)))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert gpu.launched > 0


def test_more_beams_than_the_engine_has_rows_are_refused_before_compute(
    bundle: Bundle, open_fake: OpenFake
) -> None:
    session, gpu, _ = open_fake(bundle, max_batch=5, max_context=SLOTS)
    with pytest.raises(ValueError, match="batch_size is 6, the engine takes 1 to 5"):
        generate(session, [[1], [2]], GenerationParams(num_beams=3))
    assert gpu.executed == 0
