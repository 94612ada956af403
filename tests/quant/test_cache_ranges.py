"""Ranges of quantized caches, from statistics whose least and largest values are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvgraph.quant.cache_ranges import choose_cache_range
from kvgraph.quant.scheme import CacheScheme
from kvgraph.quant.statistics import CacheStatistics

MAXIMUM = {"int8": 127.0, "float8_e4m3fn": 448.0}


def statistics(low: float, high: float, turned: bool) -> CacheStatistics:
    """Of two heads with two channels that all reach from `low` to `high`; pairs are longer than their channels."""
    ones = np.ones((2, 2), np.float32)
    length = max(-low, high) * (1.25 if turned else 1.0)
    return CacheStatistics(
        ones * low, ones * high, ones * (low + high) / 2, ones * length, np.full(2, turned)
    )


@pytest.mark.parametrize(
    ("form", "turned", "centred", "largest", "offset"),
    [
        ("int8", False, False, 6.0, 0.0),  # values
        ("int8", True, True, 7.5, 0.0),  # keys that turn: without its mean a channel may reach further
        ("int8", False, True, 2.0, 4.0),  # keys that do not
        # Twice what was seen.
        ("float8_e4m3fn", True, True, 23.0, 4.0),
        ("float8_e4m3fn", False, False, 12.0, 0.0),
    ],
)
def test_ranges_hold_all_that_may_come(
    form: str, turned: bool, centred: bool, largest: float, offset: float
) -> None:
    found = choose_cache_range(statistics(2.0, 6.0, turned), CacheScheme(form), centred)
    np.testing.assert_allclose(found.scale, np.full((2, 2), largest / MAXIMUM[form]), rtol=1e-6)
    np.testing.assert_array_equal(found.offset, np.full((2, 2), offset))


def test_granularities_share_the_largest_range() -> None:
    spread = statistics(0.0, 1.0, False)
    sizes = np.array([[1, 2], [3, 8]], np.float32)
    spread = replace(spread, low=-sizes, high=sizes, length=sizes, mean=0 * sizes)
    for granularity, expected in (("tensor", 8.0), ("head", [2.0, 8.0]), ("channel", sizes)):
        scheme = CacheScheme("int8", granularity)  # type: ignore[arg-type]
        found = choose_cache_range(spread, scheme, False)
        np.testing.assert_allclose(found.scale * 127, expected, rtol=1e-6)


def test_channels_that_are_never_active_get_a_usable_scale(cache_scheme: CacheScheme) -> None:
    found = choose_cache_range(statistics(0.0, 0.0, True), cache_scheme, True)
    np.testing.assert_allclose(found.scale * MAXIMUM[cache_scheme.format], 1.0)
