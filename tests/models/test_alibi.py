"""ALiBi against the three functions of transformers that compute it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from kvgraph.models.alibi import SLOPES, AlibiMask, alibi_slopes
from kvgraph.models.families.falcon import FalconAlibiMask
from kvgraph.models.positions import Step


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 71, 112])
def test_alibi_slopes_are_those_of_bloom_and_mpt(heads: int) -> None:
    slopes = alibi_slopes(heads).numpy()
    # The bias of slot 1 in one, of the token before the last in the other.
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    np.testing.assert_allclose(slopes, bloom, rtol=1e-6)
    np.testing.assert_allclose(slopes, -build_mpt_alibi_tensor(heads, 2)[:, 0, 0], rtol=1e-6)


def step(past: list[int], new: int, slots: int, heads: int) -> Step:
    positions = torch.tensor(past)[:, None] + torch.arange(new)
    return Step(positions, torch.arange(slots), None, {SLOPES: alibi_slopes(heads)})


def test_alibi_mask_falls_with_the_distance_and_hides_what_comes_later() -> None:
    (mask,) = AlibiMask(3, torch.float32)(step([0, 5], 2, 9, 3))
    assert mask.shape == (2, 3, 2, 9)
    for row, past in enumerate((0, 5)):
        for token in range(2):
            for slot in range(9):
                distance = past + token - slot
                expected = -alibi_slopes(3) * distance if distance >= 0 else torch.finfo(torch.float32).min
                assert (mask[row, :, token, slot] == expected).all()


def test_alibi_of_near_tokens_is_exact_in_float16_at_any_position() -> None:
    (mask,) = AlibiMask(8, torch.float16)(step([30000], 1, 30001, 8))
    expected = -alibi_slopes(8)[:, None] * torch.arange(8).flip(0)
    torch.testing.assert_close(mask[0, :, 0, -8:].float(), expected, rtol=0, atol=0)


def test_falcons_alibi_is_rounded_to_bfloat16_as_transformers_rounds_it() -> None:
    heads, head_dim, length = 6, 10, 700
    (mask,) = FalconAlibiMask(heads, head_dim, torch.float32)(step([length - 1], 1, length, heads))
    visible = torch.ones(1, length, dtype=torch.int64)
    theirs = build_falcon_alibi_tensor(visible, heads, torch.float32)[:, 0] / head_dim**0.5
    np.testing.assert_allclose(mask[0, :, 0], theirs - theirs[:, -1:], atol=1e-5)
    # The rounding is of a size that matters.
    (exact,) = AlibiMask(heads, torch.float32)(step([length - 1], 1, length, heads))
    assert (mask - exact / head_dim**0.5).abs().max() > 0.1
