"""T5's buckets against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from kvgraph.models.relative_bias import distance_buckets


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (10, 17), (8, 20), (64, 1000)])
def test_every_distance_is_in_the_bucket_of_transformers(
    num_buckets: int, max_distance: int, bidirectional: bool
) -> None:
    # Beyond the largest distance, too, where the table's ends stand for all that follows.
    relative = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    right = T5Attention._relative_position_bucket(relative, bidirectional, num_buckets, max_distance)
    table = distance_buckets(num_buckets, max_distance, bidirectional)
    assert torch.equal(table[relative.clamp(-max_distance, max_distance) + max_distance], right)
