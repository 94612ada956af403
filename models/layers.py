"""The parts that decoder layers are made of.

Every module takes its types explicitly (`Precision`) and allocates parameters with `torch.empty`, so that it can be
built on the meta device or under fake tensors at no cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvgraph.models import ops
from kvgraph.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Precision:
    """Element types of a module.

    Attributes:
        compute: Weights, activations and cache.
        residual: The stream that layers add to; float32 where it would overflow the compute type.
    """

    compute: torch.dtype
    residual: torch.dtype

    @property
    def scales_products(self) -> bool:
        """Whether what goes to the stream is computed in float16 and has float32's range, see `stream_product`."""
        return (self.compute, self.residual) == (torch.float16, torch.float32)

    @property
    def branch(self) -> torch.dtype:
        """Type of what layers add to the stream."""
        return self.residual if self.scales_products else self.compute


class Linear(nn.Module):
    """x @ weight + bias with the weight stored [in, out], as MatMul and its quantized kernels take it."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        product = torch.matmul(x, self.weight)
        return product if self.bias is None else product + self.bias


def stream_product(x: Tensor, weight: Tensor, precision: Precision) -> Tensor:
    """x @ weight of what a layer adds to the residual stream, [..., in] and [..., in, out] -> [..., out].

    A product may be out of float16's range though its factors are not. Where `precision` asks for it, each row of x is
    divided by a power of two, so that no entry is above one, and the float16 product is multiplied by it in float32.
    It holds where the magnitudes of a column of the weight add up to at most 65504, and is exact but for entries so far
    below their row's largest that float16 has few digits left for them. Weights keep their 16 bits: with casts to
    float32 around the product instead, TensorRT stores them in 32 (measured).
    """
    if not precision.scales_products:
        product: Tensor = torch.matmul(x, weight)
        return product
    wide = x.to(torch.float32)
    scale: Tensor = ops.row_scale(wide)
    return torch.matmul((wide / scale).to(weight.dtype), weight).to(torch.float32) * scale


class StreamLinear(Linear):
    """A `Linear` whose result a layer adds to the residual stream, in `Precision.branch`."""

    def __init__(self, in_features: int, out_features: int, bias: bool, precision: Precision) -> None:
        super().__init__(in_features, out_features, bias, precision.compute)
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        product = stream_product(x, self.weight, self.precision)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class Embedding(nn.Module):
    """Rows of a [V, E] table."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        """[B, S] int64 -> [B, S, E]."""
        rows: Tensor = functional.embedding(ids, self.weight)
        return rows


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed and weighted in float32 whatever comes in; returns `out_dtype`."""

    def __init__(self, size: int, eps: float, out_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.eps = eps
        self.out_dtype = out_dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] -> [..., E]."""
        normed: Tensor = ops.rms_norm(x.to(torch.float32), self.weight, self.eps)
        return normed.to(self.out_dtype)


class Cast(nn.Module):
    """What stands where other models have a norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """[..., E] in any type to `dtype`."""
        return x.to(self.dtype)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    # Two spellings of one function.
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    # Three spellings of one formula.
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "relu": functional.relu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that a config's `hidden_act` names.

    Raises:
        ValueError: The name is not known.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act {name!r} is not known; known are {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


def gated(act: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor, precision: Precision) -> Tensor:
    """act(gate) * up, the input of a `stream_product`, in its type: two float16 factors may overflow here already."""
    return act(gate.to(precision.branch)) * up.to(precision.branch)


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool, precision: Precision
    ) -> None:
        super().__init__()
        self.up_proj = Linear(hidden_size, intermediate_size, bias, precision.compute)
        self.down_proj = StreamLinear(intermediate_size, hidden_size, bias, precision)
        self.act = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        result: Tensor = self.down_proj(self.act(self.up_proj(x)))
        return result


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str, bias: bool, precision: Precision
    ) -> None:
        super().__init__()
        self.precision = precision
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, precision.compute)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, precision.compute)
        self.down_proj = StreamLinear(intermediate_size, hidden_size, bias, precision)
        self.act = activation(hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, E] -> [B, S, E]."""
        inner = gated(self.act, self.gate_proj(x), self.up_proj(x), self.precision)
        result: Tensor = self.down_proj(inner)
        return result


class Attention(nn.Module):
    """Attention with grouped key/value heads over a cache buffer that it also writes."""

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        *,
        qkv_bias: bool,
        out_bias: bool,
        scale: float | None = None,
        interleaved: bool = False,
    ) -> None:
        """Projections as `config` sizes them.

        Args:
            config: Hidden size, heads, key/value heads and head dimension.
            precision: Element types.
            qkv_bias: Whether the query, key and value projections have biases.
            out_bias: Whether the output projection has one.
            scale: Factor on the scores; default 1 / sqrt(D).
            interleaved: Whether rotary pairs are neighbours rather than half a head apart.
        """
        super().__init__()
        size, heads, dtype = config.hidden_size, config.num_attention_heads, precision.compute
        self.head_dim = config.head_dim
        self.kv_shape = (config.num_key_value_heads, config.head_dim)
        key_value_size = config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(size, heads * self.head_dim, qkv_bias, dtype)
        self.k_proj = Linear(size, key_value_size, qkv_bias, dtype)
        self.v_proj = Linear(size, key_value_size, qkv_bias, dtype)
        self.o_proj = StreamLinear(heads * self.head_dim, size, out_bias, precision)
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.interleaved = interleaved

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, E] -> [B, H, S, D] and [B, K, S, D], before the rotation; families that norm them override it."""
        return self.split_heads(self.q_proj(x)), self.split_heads(self.k_proj(x))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """[B, H, S, D], [B, K, T, D] twice and a mask -> [B, H, S, D]; families with soft caps override it."""
        attended: Tensor = ops.attention(query, key, value, mask, self.scale)
        return attended

    def forward(
        self,
        x: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        mask: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend to the cache and the new tokens.

        Args:
            x: [B, S, E].
            past_length: [B] int64.
            past_key: [B, K, T, D].
            past_value: [B, K, T, D].
            mask: [B, 1, S, T] bool, or [B, 1 or H, S, T] float to add to the scores.
            cos: [B, S, R]; None in a layer without rotary positions.
            sin: [B, S, R].

        Returns:
            [B, S, E], and the two buffers with the new entries.
        """
        query, key = self.queries_and_keys(x)
        if cos is not None and sin is not None:
            query = ops.rotary_embedding(query, cos, sin, self.interleaved)
            key = ops.rotary_embedding(key, cos, sin, self.interleaved)
        present_key = ops.tensor_scatter(past_key, key, past_length)
        present_value = ops.tensor_scatter(past_value, self.split_heads(self.v_proj(x)), past_length)
        attended = self.attend(query, present_key, present_value, mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2)), present_key, present_value


class NormedAttention(Attention):
    """Attention that norms the query and the key of each head before their rotation."""

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        *,
        qkv_bias: bool,
        out_bias: bool,
        norm_eps: float,
        scale: float | None = None,
    ) -> None:
        """As `Attention`; `norm_eps` is that of both norms."""
        super().__init__(config, precision, qkv_bias=qkv_bias, out_bias=out_bias, scale=scale)
        self.q_norm = RMSNorm(self.head_dim, norm_eps, precision.compute)
        self.k_norm = RMSNorm(self.head_dim, norm_eps, precision.compute)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Attention.queries_and_keys`."""
        query, key = super().queries_and_keys(x)
        return self.q_norm(query), self.k_norm(key)
