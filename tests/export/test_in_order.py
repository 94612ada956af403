"""Work on several cores whose results come in order."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvgraph.export import in_order
from kvgraph.export.in_order import do_all, map_in_order


@pytest.fixture(params=[1, 3])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """As many cores as a test wants."""
    monkeypatch.setattr(in_order, "core_count", lambda: request.param)
    return request.param


def test_results_come_in_the_order_of_the_items(cores: int) -> None:
    def late(item: int) -> int:
        # Later items are ready first.
        time.sleep(0.002 * (20 - item))
        return item * item

    assert list(map_in_order(late, range(20))) == [item * item for item in range(20)]


def test_items_are_taken_as_they_are_needed(cores: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            yield item

    results = map_in_order(lambda item: item, items())
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(taken) <= 3 + 2 * cores


def test_first_error_in_the_order_of_the_items_is_raised(cores: int) -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item in (4, 5):
            raise ValueError(f"item {item}")
        done.append(item)

    with pytest.raises(ValueError, match="item 4"):
        do_all(work, range(100))
    assert set(done) >= {0, 1, 2, 3}
    assert len(done) < 100


def test_nothing_is_asked_for_where_there_are_no_items(cores: int) -> None:
    assert list(map_in_order(str, [])) == []
