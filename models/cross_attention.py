"""The attention that encoder-decoder models have beside the decoder's own: within a source, and across to it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from kvgraph.models import ops
from kvgraph.models.layers import Linear, Precision, StreamLinear
from kvgraph.models.positions import Step


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[B, S, heads * D] -> [B, heads, S, D]."""
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


class SourceAttention(nn.Module):
    """Attention of the tokens of a source to each other, without a cache."""

    def __init__(
        self, hidden_size: int, heads: int, head_dim: int, precision: Precision, *, bias: bool, scale: float
    ) -> None:
        """`heads` heads of `head_dim`, whose scores are multiplied by `scale`; `bias` is that of all projections."""
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.q_proj = Linear(hidden_size, heads * head_dim, bias, precision.compute)
        self.k_proj = Linear(hidden_size, heads * head_dim, bias, precision.compute)
        self.v_proj = Linear(hidden_size, heads * head_dim, bias, precision.compute)
        self.o_proj = StreamLinear(heads * head_dim, hidden_size, bias, precision)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[B, C, E] and a mask [B, 1 or H, C, C], bool or to add -> [B, C, E]."""
        query, key, value = (
            split_heads(projection(x), self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended: Tensor = ops.attention(query, key, value, mask, self.scale)
        result: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return result


class CrossAttention(nn.Module):
    """Attention of the decoder to a source whose keys and values are there already: `CrossProjection` made them."""

    def __init__(
        self, hidden_size: int, heads: int, head_dim: int, precision: Precision, *, bias: bool, scale: float
    ) -> None:
        """As `SourceAttention`."""
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.q_proj = Linear(hidden_size, heads * head_dim, bias, precision.compute)
        self.o_proj = StreamLinear(heads * head_dim, hidden_size, bias, precision)

    def forward(self, x: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """[B, S, E], keys and values [B, K, C, D] and a mask [B, 1, S, C] bool -> [B, S, E]."""
        query = split_heads(self.q_proj(x), self.head_dim)
        attended: Tensor = ops.attention(query, key, value, mask, self.scale)
        result: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return result


class CrossProjection(nn.Module):
    """The keys and values that a layer of the decoder reads of a source: the same at every step, so made once."""

    def __init__(
        self, hidden_size: int, heads: int, head_dim: int, dtype: torch.dtype, *, bias: bool
    ) -> None:
        """For `heads` heads of `head_dim`."""
        super().__init__()
        self.head_dim = head_dim
        self.kv_shape = (heads, head_dim)
        self.k_proj = Linear(hidden_size, heads * head_dim, bias, dtype)
        self.v_proj = Linear(hidden_size, heads * head_dim, bias, dtype)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What leaves the encoder, [B, C, E], to keys and values [B, K, C, D]."""
        return split_heads(self.k_proj(x), self.head_dim), split_heads(self.v_proj(x), self.head_dim)


class SourceMask:
    """Which tokens of a source see which: [B, 1, C, C] bool, all of them those that are no padding."""

    names: tuple[str, ...] = ("mask",)
    needs_total_length = True

    @property
    def constants(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def __call__(self, step: Step) -> tuple[Tensor]:
        """The mask, written out for every query: ONNX Runtime takes no mask of one row for several."""
        assert step.total_length is not None
        visible = step.slots < step.total_length.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1)
        return (visible.expand(-1, -1, step.slots.shape[0], -1),)


class CrossMask(nn.Module):
    """Which tokens of its source a row of the decoder sees: [B, 1, S, C] bool, those that are no padding."""

    def forward(self, input_ids: Tensor, encoder_length: Tensor, cross_key: Tensor) -> Tensor:
        """`input_ids` [B, S] is read for S and `cross_key` [B, K, C, D] for C alone."""
        slots = torch.arange(cross_key.shape[2], device=input_ids.device)
        visible = slots < encoder_length.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1)
        return visible.expand(-1, -1, input_ids.shape[1], -1)
