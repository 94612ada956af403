"""Rotary angles and masks against NumPy formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraph.models.positions import CausalMask, Rotary, Step
from kvgraph.models.rope import RopeConfig

# Neither bfloat16 nor, the last, float16 holds the odd ones: as such they would be off by whole radians.
POSITIONS = (0, 1, 511, 513, 4095, 4097, 65537)
HEAD_DIM = 8
# Half a unit in the last place below one; and what a float32 angle is off at the largest position.
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
ANGLE_TOLERANCE = 65537 * 2.0**-23


def step(rotary: Rotary | None, positions: np.ndarray, slots: int = 1) -> Step:
    constants = {} if rotary is None else rotary.constants
    return Step(torch.from_numpy(positions), torch.arange(slots), None, constants)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_angles_are_right_at_long_range_whatever_the_type(dtype: torch.dtype) -> None:
    rotary = Rotary(RopeConfig("default", 10000.0), HEAD_DIM, dtype)
    found = rotary(step(rotary, np.array([POSITIONS])))
    angles = np.array(POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    for tensor, expected in zip(found, (np.cos(angles), np.sin(angles)), strict=True):
        assert tensor.dtype == dtype
        off = np.abs(tensor[0].double().numpy() - expected).max()
        assert off <= ROUNDING[dtype] + ANGLE_TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_mask_shows_what_lies_before_and_within_the_window(window: int | None) -> None:
    positions = np.array([[0, 1, 2], [3, 4, 5], [9, 10, 11]])
    (found,) = CausalMask(window)(step(None, positions, slots=12))
    slot, position = np.arange(12), positions[:, None, :, None]
    expected = (slot <= position) & (slot > position - (window or 1000))
    np.testing.assert_array_equal(found.numpy(), expected)
    # Every token sees at least itself.
    assert found.any(-1).all()
