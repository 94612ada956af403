"""ALiBi: attention scores fall linearly with distance, with a slope for each head, in place of position embeddings."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvgraph.models.positions import Step

SLOPES = "alibi_slopes"
# The slope of the last head is 2 ** -ALIBI_BIAS_MAX where the number of heads is a power of two.
ALIBI_BIAS_MAX = 8


def alibi_slopes(num_heads: int) -> Tensor:
    """The slope of each head, [H] float32.

    For n heads, n a power of two, they are 2 ** (-8 i / n), i = 1 ... n. Any other number takes those of the next
    smaller power of two, then every second one of twice that.
    """
    smaller = 1 << (num_heads.bit_length() - 1)
    exponents = [ALIBI_BIAS_MAX * i / smaller for i in range(1, smaller + 1)]
    exponents += [ALIBI_BIAS_MAX * i / (2 * smaller) for i in range(1, 2 * (num_heads - smaller), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)


class AlibiMask:
    """What to add to the scores: [B, H, S, T], slope * (j - p) for slot j <= position p, the lowest number beyond.

    The bias is written from the distance, though softmax would take slope * j as well: the bias of near tokens is then
    small and exact in half precision, however long the text is.
    """

    names: tuple[str, ...] = ("mask",)
    needs_total_length = False

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        """Bias for `num_heads` heads in the compute type."""
        self.num_heads = num_heads
        self.dtype = dtype

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """The slopes."""
        return {SLOPES: alibi_slopes(self.num_heads)}

    def bias(self, slopes: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """[H, 1, 1], [B, 1, S, 1] int64 and [T] int64 to [B, H, S, T] float32."""
        return slopes * (slots - positions).to(torch.float32)

    def __call__(self, step: Step) -> tuple[Tensor]:
        """The mask."""
        positions = step.positions.unsqueeze(1).unsqueeze(-1)
        slopes = step.constants[SLOPES].unsqueeze(-1).unsqueeze(-1)
        bias = self.bias(slopes, positions, step.slots).to(self.dtype)
        return (torch.where(step.slots <= positions, bias, torch.finfo(self.dtype).min),)
