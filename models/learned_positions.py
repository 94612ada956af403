"""Position embeddings that are a table of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgraph.models.decoder import Prelude
from kvgraph.models.layers import Embedding
from kvgraph.models.positions import Shared


class LearnedPositionsPrelude(Prelude):
    """Token embedding plus the row of the position; each row of a batch has positions of its own.

    The table has a row for each position that a sequence may have: `ModelConfig.max_positions`, beyond which sessions
    refuse to go.
    """

    def __init__(
        self,
        embed_tokens: Embedding,
        embed_positions: Embedding,
        shared: Sequence[Shared],
        residual: torch.dtype,
        embedding_scale: float = 1.0,
    ) -> None:
        """See `Prelude`."""
        super().__init__(embed_tokens, shared, residual, embedding_scale)
        self.embed_positions = embed_positions

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """See `Prelude.embed`."""
        rows: Tensor = self.embed_positions(positions)
        return super().embed(input_ids, positions) + rows.to(self.residual)
