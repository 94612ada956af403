"""T5's position embedding: a learned bias on attention scores for each head and bucket of distances."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvgraph.models.positions import Step


def distance_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """Bucket of each distance -max_distance ... max_distance, key minus query: [2 * max_distance + 1] int64.

    Half of the buckets stand for one distance each; the others grow with the logarithm of the distance up to
    `max_distance`, and the last holds all beyond. In both directions each has half of all buckets; in one, keys ahead
    of the query, which it does not see, are in the bucket of distance 0.

    The table is made by torch in float32, as T5 was trained: where a logarithm is near a whole number, another
    rounding would choose another bucket.
    """
    relative = torch.arange(-max_distance, max_distance + 1)
    first = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        first = torch.where(relative > 0, num_buckets, 0)
        distance = relative.abs()
    else:
        distance = (-relative).clamp(min=0)
    exact = num_buckets // 2
    share = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    # The logarithm of 0 is no number to convert; distances below `exact` are not looked up here.
    far = exact + (share.clamp(min=0) * (num_buckets - exact)).long()
    return first + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


class RelativeBias(nn.Module):
    """What to add to the scores, [B, H, S, T]: the bias where a key is visible, the lowest number elsewhere."""

    names: tuple[str, ...] = ("mask",)

    def __init__(
        self, heads: int, num_buckets: int, max_distance: int, bidirectional: bool, dtype: torch.dtype
    ) -> None:
        """Biases of `heads` heads in the compute type; `bidirectional` in an encoder, where padding is masked."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_buckets, heads, dtype=dtype))
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.needs_total_length = bidirectional
        self.constant = "source_buckets" if bidirectional else "buckets"

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """The table of buckets."""
        return {self.constant: distance_buckets(self.num_buckets, self.max_distance, self.bidirectional)}

    def forward(self, step: Step) -> tuple[Tensor]:
        """The mask of a step; [B, H, C, C] of a source."""
        positions = step.positions.unsqueeze(-1)
        distance = (step.slots - positions).clamp(-self.max_distance, self.max_distance) + self.max_distance
        by_distance = functional.embedding(step.constants[self.constant], self.weight)
        bias = functional.embedding(distance, by_distance).permute(0, 3, 1, 2)
        if self.bidirectional:
            assert step.total_length is not None
            visible = step.slots < step.total_length.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1)
        else:
            visible = (step.slots <= positions).unsqueeze(1)
        return (torch.where(visible, bias, torch.finfo(self.weight.dtype).min),)
