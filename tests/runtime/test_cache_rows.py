"""`Cache.gather_rows` of the runtimes on a CPU, against the same assignment in NumPy."""

import numpy as np
import pytest

from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime import ort_cache
from kvgraph.runtime.ort import OrtSession

# Rows of the source, first slots, slots behind the last: copies in a row, a swap, a cycle with an empty move, nothing.
GATHERS = [
    ([0, 0, 0], [0, 0, 0], [9, 9, 9]),
    ([1, 0, 2], [2, 0, 0], [9, 5, 9]),
    ([2, 0, 1], [0, 4, 3], [7, 9, 3]),
    ([0, 1, 2], [0, 0, 0], [9, 9, 9]),
]


@pytest.fixture(scope="module", params=["onnxruntime", "onnxruntime, T = 16", "torch"])
def session(request, tiny_llama, exported):
    if request.param == "torch":
        return TorchSession.open(open_checkpoint(tiny_llama()))
    return OrtSession(exported(tiny_llama(), capacity=None if request.param == "onnxruntime" else 16))


def filled(session, rows, tokens=9, seed=0):
    """A cache with other keys and values in each row, [rows, K, T, D] a tensor."""
    cache = session.allocate_cache(rows)
    ids = np.random.default_rng(seed).integers(0, 97, (rows, tokens))
    session.prefill(cache, ids, np.zeros(rows, np.int64), np.zeros((rows, 1), np.int64))
    return cache


def contents(session, cache):
    return {tensor.name: cache.read(tensor.name) for tensor in session.contract.state}


def gathered(target, source, rows, start, stop):
    expected = target.copy()
    for row, (origin, first, last) in enumerate(zip(rows, start, stop, strict=True)):
        expected[row, :, first:last] = source[origin, :, first:last]
    return expected


@pytest.mark.parametrize(("rows", "start", "stop"), GATHERS)
def test_rows_of_the_cache_itself(session, rows, start, stop):
    cache = filled(session, 3)
    before = contents(session, cache)
    cache.gather_rows(cache, *map(np.array, (rows, start, stop)))
    for name, after in contents(session, cache).items():
        np.testing.assert_array_equal(after, gathered(before[name], before[name], rows, start, stop))


def test_rows_of_a_smaller_cache(session):
    source, target = filled(session, 2), filled(session, 4, seed=1)
    before = contents(session, target)
    arguments = [1, 0, 0, 1], [0, 2, 0, 9], [9, 9, 0, 9]
    target.gather_rows(source, *map(np.array, arguments))
    for name, after in contents(session, target).items():
        np.testing.assert_array_equal(
            after, gathered(before[name], contents(session, source)[name], *arguments)
        )


def test_a_new_cache_grows_to_what_it_takes(tiny_llama, exported, monkeypatch):
    monkeypatch.setattr(ort_cache, "FIRST_CAPACITY", 8)
    session = OrtSession(exported(tiny_llama()))
    source, target = filled(session, 1, 20), session.allocate_cache(2)
    target.gather_rows(source, np.zeros(2, np.int64), np.zeros(2, np.int64), np.array([3, 20]))
    assert target.capacity == source.capacity == 32
    name = session.contract.state[0].name
    np.testing.assert_array_equal(target.read(name)[1], source.read(name)[0])
    assert not target.read(name)[0, :, 3:].any()


def test_steps_after_it_are_those_of_the_row_that_was_taken(session):
    cache = filled(session, 3)
    past, tokens = np.full(3, 9), np.array([[5], [6], [7]])
    cache.gather_rows(cache, np.array([0, 2, 2]), np.zeros(3, np.int64), past)
    found = session.decode(cache, tokens, past).copy()
    other = filled(session, 3)
    expected = session.decode(other, tokens[[0, 2, 1]], past)[0].copy()
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    # Row 1 has the past of row 2 and its own token.
    np.testing.assert_allclose(found[1], session.decode(other, np.full((3, 1), 6), past)[2], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0, 3], [0, 0], [1, 1]), r"rows\[1\] is 3, expected 0 <= row < 2"),
        (([0, -1], [0, 0], [1, 1]), r"rows\[1\] is -1"),
        (([1, 0], [2, 0], [1, 1]), "row 0 takes slots 2 to 1, expected 0 <= start <= stop"),
        (([1, 0], [0, 0], [1, 99]), "row 1 takes slots 0 to 99, expected"),
        (([1], [0], [1]), r"rows has shape \[1\], expected \[2\]"),
    ],
)
def test_rows_and_slots_out_of_range_are_refused(session, arguments, message):
    cache = session.allocate_cache(2)
    with pytest.raises(ValueError, match=message):
        cache.gather_rows(cache, *map(np.array, arguments))


def test_cache_of_another_session_is_refused(tiny_llama, exported):
    bundle = exported(tiny_llama())
    cache, other = (OrtSession(bundle).allocate_cache(1) for _ in range(2))
    zero = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="belongs to another session"):
        cache.gather_rows(other, zero, zero, zero)
