"""Layer norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvgraph.models import ops


class LayerNorm(nn.Module):
    """Layer norm, computed and weighted in float32 whatever comes in; returns `out_dtype`."""

    def __init__(self, size: int, eps: float, out_dtype: torch.dtype, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(size, dtype=torch.float32)) if bias else None
        self.eps = eps
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        normed: Tensor = ops.layer_norm(x.to(torch.float32), self.weight, self.bias, self.eps)
        return normed.to(self.out_dtype)
