"""Position embeddings that are sines and cosines of the position, as the Transformer of 2017 has them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvgraph.models.decoder import Prelude

BASE = 10000.0


def sinusoidal_positions(positions: Tensor, size: int) -> Tensor:
    """Positions [B, S] int64 to [B, S, E] float32, E even.

    Dimension 2i is sin(position / 10000 ** (2i / E)), dimension 2i + 1 its cosine.
    """
    turned = angles(positions, size)
    return torch.stack((turned.sin(), turned.cos()), dim=-1).flatten(-2)


def angles(positions: Tensor, size: int) -> Tensor:
    """Positions [B, S] int64 to position / 10000 ** (2i / E), [B, S, E / 2] float32."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
    return positions.unsqueeze(-1).to(torch.float32) * BASE**-exponents


class HalvesPrelude(Prelude):
    """Token embedding plus sines, then cosines, of the position."""

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Prelude.embed`."""
        rows = super().embed(input_ids, positions)
        turned = angles(positions, rows.shape[-1])
        return rows + torch.cat((turned.sin(), turned.cos()), dim=-1).to(self.residual)


class SinusoidalPrelude(Prelude):
    """Token embedding plus sines and cosines of the position."""

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Prelude.embed`."""
        rows = super().embed(input_ids, positions)
        return rows + sinusoidal_positions(positions, rows.shape[-1]).to(self.residual)
