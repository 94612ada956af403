"""Holding the collector back, and letting it go."""

from __future__ import annotations

import gc

import pytest

from kvgraph.export.collector import without_collecting


def test_collects_again_after_an_error() -> None:
    def fail() -> None:
        with without_collecting():
            assert not gc.isenabled()
            raise ValueError("no")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        fail()
    assert gc.isenabled()


def test_leaves_a_disabled_collector_disabled() -> None:
    gc.disable()
    try:
        with without_collecting():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
