"""How attention, feed-forward part and norms are joined into a layer."""

from __future__ import annotations

from torch import Tensor, nn

from kvgraph.models.decoder import DecoderLayer
from kvgraph.models.layers import Attention


class SequentialLayer(DecoderLayer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: Attention,
        post_attention_layernorm: nn.Module,
        mlp: nn.Module,
        *,
        shared: tuple[str, ...] = DecoderLayer.shared,
        kind: str = DecoderLayer.kind,
    ) -> None:
        """Compose the parts; `shared` and `kind` as `DecoderLayer` has them."""
        super().__init__()
        self.kind = kind
        self.shared = shared
        self.kv_shape = self_attn.kv_shape
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderLayer`."""
        normed = self.input_layernorm(hidden_states)
        attended, key, value = self.self_attn(normed, past_length, past_key, past_value, *shared)
        hidden_states = hidden_states + attended.to(hidden_states.dtype)
        fed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + fed_forward.to(hidden_states.dtype), key, value


class ParallelLayer(DecoderLayer):
    """x + attention(norm(x)) + mlp(norm(x)), each branch with a norm of its own or both with one."""

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: Attention,
        post_attention_layernorm: nn.Module | None,
        mlp: nn.Module,
        *,
        shared: tuple[str, ...] = DecoderLayer.shared,
    ) -> None:
        """Compose the parts; without `post_attention_layernorm` both branches read the first norm."""
        super().__init__()
        self.shared = shared
        self.kv_shape = self_attn.kv_shape
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderLayer`."""
        normed = self.input_layernorm(hidden_states)
        attended, key, value = self.self_attn(normed, past_length, past_key, past_value, *shared)
        second = self.post_attention_layernorm
        fed_forward = self.mlp(normed if second is None else second(hidden_states))
        stream = hidden_states.dtype
        return hidden_states + attended.to(stream) + fed_forward.to(stream), key, value
