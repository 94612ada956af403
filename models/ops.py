"""The operators that a trace must keep whole, as torch custom operators.

Each runs eagerly in plain torch (so that the module is its own reference) and is one node of the standard ONNX
domain after export: `kvgraph.export.translate` holds the other half of every pair.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional

# From natural logarithms to those of base two.
LOG2_E = 1 / math.log(2)


@custom_op("kvgraph::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Scaled dot-product attention with grouped key/value heads; softmax in float32.

    Args:
        query: [B, H, S, D].
        key: [B, K, T, D]; query head h reads head h // (H / K).
        value: [B, K, T, D].
        mask: [B, 1 or H, S, T]; bool (True = visible) or float (added to the scaled scores).
        scale: Factor on the scores.

    Returns:
        [B, H, S, D] in the type of `query`.
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    visible = mask.dtype == torch.bool
    scores = scores.masked_fill(~mask, float("-inf")) if visible else scores + mask.float()
    return (torch.softmax(scores, dim=-1).to(value.dtype) @ value).to(query.dtype)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


@custom_op("kvgraph::rotary_embedding", mutates_args=())
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2R of D dimensions of every head by the angle of its position.

    Args:
        x: [B, H, S, D].
        cos: [B, S, R], R <= D / 2.
        sin: [B, S, R].
        interleaved: Pairs are (2r, 2r + 1) rather than (r, r + R).
    """
    rotated_size = 2 * cos.shape[-1]
    head, tail = x[..., :rotated_size], x[..., rotated_size:]
    cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        first, second = head[..., 0::2], head[..., 1::2]
    else:
        first, second = head.chunk(2, dim=-1)
    real, imaginary = first * cos - second * sin, first * sin + second * cos
    pair = (real, imaginary)
    head = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((head, tail), dim=-1)


@rotary_embedding.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x)


@custom_op("kvgraph::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, [..., E] float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@custom_op("kvgraph::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, [..., E] float32."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


@custom_op("kvgraph::row_scale", mutates_args=())
def row_scale(x: Tensor) -> Tensor:
    """The least power of two that is at least one and at least a row's largest magnitude: [..., I] float32 -> [..., 1].

    Where the logarithm of a power of two is rounded up it is twice that, which serves as well.
    """
    largest = x.abs().amax(-1, keepdim=True).clamp(min=1.0)
    return torch.exp2(torch.ceil(largest.log() * LOG2_E))


@row_scale.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1))


@custom_op("kvgraph::tensor_scatter", mutates_args=())
def tensor_scatter(past: Tensor, update: Tensor, past_length: Tensor) -> Tensor:
    """The cache buffer with each row's new entries written at its own position.

    Args:
        past: [B, K, T, D].
        update: [B, K, S, D].
        past_length: [B] int64; row b is written at slots past_length[b] ... past_length[b] + S - 1.
    """
    slots = past_length[:, None] + torch.arange(update.shape[2], device=past.device)
    index = slots[:, None, :, None].expand(update.shape)
    return past.scatter(2, index, update)


@tensor_scatter.register_fake
def _(past: Tensor, update: Tensor, past_length: Tensor) -> Tensor:
    return torch.empty_like(past)


@custom_op("kvgraph::gather_rows", mutates_args=())
def gather_rows(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x that `indices` names: x [B, S, E], indices [B, N] int64 -> [B, N, E]."""
    return x.gather(1, indices[:, :, None].expand(*indices.shape, x.shape[-1]))


@gather_rows.register_fake
def _(x: Tensor, indices: Tensor) -> Tensor:
    return x.new_empty((*indices.shape, x.shape[-1]))


@custom_op("kvgraph::tied_head", mutates_args=())
def tied_head(x: Tensor, embedding: Tensor) -> Tensor:
    """x @ embedding^T for the embedding table itself: x [rows, E], embedding [V, E] -> [rows, V]."""
    return x @ embedding.T


@tied_head.register_fake
def _(x: Tensor, embedding: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], embedding.shape[0]))
