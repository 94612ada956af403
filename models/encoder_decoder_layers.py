"""How attention, feed-forward part and norms are joined into layers of an encoder, and of the decoder beside it."""

from __future__ import annotations

from torch import Tensor, nn

from kvgraph.models.cross_attention import CrossAttention, SourceAttention
from kvgraph.models.encoder_decoder import CrossDecoderLayer, EncoderLayer
from kvgraph.models.layers import Attention


class _EncoderParts(EncoderLayer):
    """The parts of a layer of an encoder."""

    def __init__(
        self, self_attn: SourceAttention, self_attn_norm: nn.Module, mlp: nn.Module, mlp_norm: nn.Module
    ) -> None:
        """Compose the parts, each with its norm."""
        super().__init__()
        self.self_attn = self_attn
        self.self_attn_norm = self_attn_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm


class PostNormEncoderLayer(_EncoderParts):
    """norm(x + attention(x)), then norm(x + mlp(x)); what norms return is the stream."""

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        """See `EncoderLayer`."""
        stream, compute = hidden_states.dtype, self.self_attn.q_proj.weight.dtype
        attended = self.self_attn(hidden_states.to(compute), mask)
        hidden_states = self.self_attn_norm(hidden_states + attended.to(stream))
        fed_forward = self.mlp(hidden_states.to(compute))
        result: Tensor = self.mlp_norm(hidden_states + fed_forward.to(stream))
        return result


class PreNormEncoderLayer(_EncoderParts):
    """x + attention(norm(x)), then x + mlp(norm(x)); what norms return is of the compute type."""

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        """See `EncoderLayer`."""
        attended = self.self_attn(self.self_attn_norm(hidden_states), mask)
        hidden_states = hidden_states + attended.to(hidden_states.dtype)
        fed_forward = self.mlp(self.mlp_norm(hidden_states))
        result: Tensor = hidden_states + fed_forward.to(hidden_states.dtype)
        return result


class _CrossParts(CrossDecoderLayer):
    """The parts of a layer of a decoder that reads a source."""

    def __init__(
        self,
        self_attn: Attention,
        self_attn_norm: nn.Module,
        cross_attn: CrossAttention,
        cross_attn_norm: nn.Module,
        mlp: nn.Module,
        mlp_norm: nn.Module,
    ) -> None:
        """Compose the parts, each with its norm."""
        super().__init__()
        self.kv_shape = self_attn.kv_shape
        self.self_attn = self_attn
        self.self_attn_norm = self_attn_norm
        self.cross_attn = cross_attn
        self.cross_attn_norm = cross_attn_norm
        self.mlp = mlp
        self.mlp_norm = mlp_norm


class PostNormCrossLayer(_CrossParts):
    """norm(x + attention(x)), then the same with attention to the source, then with the mlp."""

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        cross_key: Tensor,
        cross_value: Tensor,
        mask: Tensor,
        cross_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `CrossDecoderLayer`."""
        stream, compute = hidden_states.dtype, self.self_attn.q_proj.weight.dtype
        attended, key, value = self.self_attn(
            hidden_states.to(compute), past_length, past_key, past_value, mask
        )
        hidden_states = self.self_attn_norm(hidden_states + attended.to(stream))
        crossed = self.cross_attn(hidden_states.to(compute), cross_key, cross_value, cross_mask)
        hidden_states = self.cross_attn_norm(hidden_states + crossed.to(stream))
        fed_forward = self.mlp(hidden_states.to(compute))
        return self.mlp_norm(hidden_states + fed_forward.to(stream)), key, value


class PreNormCrossLayer(_CrossParts):
    """x + attention(norm(x)), then the same with attention to the source, then with the mlp."""

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        cross_key: Tensor,
        cross_value: Tensor,
        mask: Tensor,
        cross_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `CrossDecoderLayer`."""
        stream = hidden_states.dtype
        attended, key, value = self.self_attn(
            self.self_attn_norm(hidden_states), past_length, past_key, past_value, mask
        )
        hidden_states = hidden_states + attended.to(stream)
        crossed = self.cross_attn(self.cross_attn_norm(hidden_states), cross_key, cross_value, cross_mask)
        hidden_states = hidden_states + crossed.to(stream)
        fed_forward = self.mlp(self.mlp_norm(hidden_states))
        return hidden_states + fed_forward.to(stream), key, value
