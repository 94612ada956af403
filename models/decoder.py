"""A decoder-only model as three pieces that are traced apart: prelude, layer, head.

`Prelude` turns ids and positions into the residual stream and what every layer shares (rotary angles, masks); a layer
adds to the stream and updates its cache; `Head` turns rows of the stream into logits. The exporter traces each piece
once per kind of layer; `Decoder.forward` is the same pieces in eager torch, the reference of every comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from kvgraph.models import ops
from kvgraph.models.config import ModelConfig
from kvgraph.models.layers import Embedding, Linear, Precision, RMSNorm
from kvgraph.models.rope import dynamic_inverse_frequencies, inverse_frequencies


class DecoderLayer(Protocol):
    """What the decoder asks of a layer."""

    def __call__(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stream after the layer [B, S, E] and its two cache buffers [B, K, T, D]."""
        ...


class Prelude(nn.Module):
    """Ids and positions to the residual stream, rotary angles and mask."""

    shared_names = ("cos", "sin", "mask")

    def __init__(self, config: ModelConfig, embed_tokens: Embedding, precision: Precision) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = embed_tokens
        self.precision = precision

    def forward(
        self,
        input_ids: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        frequencies: Tensor | None = None,
        new_length: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the first layer and all layers read.

        Args:
            input_ids: [B, S] int64.
            past_length: [B] int64.
            past_key: [B, K, T, D], read for T alone.
            frequencies: [D / 2] float32, radians a position; None where they depend on the total length.
            new_length: [B] int64, only where the frequencies depend on the total length.

        Returns:
            The stream [B, S, E], cos and sin [B, S, D / 2] in the compute type, and the mask [B, 1, S, T] bool:
            the key in slot j is visible to the token at position p where j <= p.
        """
        positions = past_length.unsqueeze(1) + torch.arange(input_ids.shape[1], device=input_ids.device)
        slots = torch.arange(past_key.shape[2], device=input_ids.device)
        mask = slots <= positions.unsqueeze(1).unsqueeze(-1)
        if frequencies is None:
            assert new_length is not None
            total = past_length + new_length
            frequencies = dynamic_inverse_frequencies(
                self.config.rope, self.config.head_dim, total
            ).unsqueeze(1)
        # float32 until the last cast: a half-precision angle is wrong by whole radians at a few thousand positions.
        angles = positions.unsqueeze(-1).to(torch.float32) * frequencies
        compute = self.precision.compute
        hidden_states = self.embed_tokens(input_ids).to(self.precision.residual)
        return hidden_states, angles.cos().to(compute), angles.sin().to(compute), mask


class Head(nn.Module):
    """Rows of the residual stream to logits."""

    def __init__(self, norm: RMSNorm, lm_head: Linear | None, embed_tokens: Embedding) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        if lm_head is None:
            self.embed_tokens = embed_tokens

    def forward(self, hidden_states: Tensor, logit_positions: Tensor | None = None) -> Tensor:
        """[B, S, E], and which of the S rows [B, N] int64 (default: all), to [B, N, V] float32."""
        if logit_positions is not None:
            hidden_states = ops.gather_rows(hidden_states, logit_positions)
        rows: Tensor = self.norm(hidden_states)
        if self.lm_head is None:
            logits: Tensor = ops.tied_head(rows.flatten(0, 1), self.embed_tokens.weight)
            logits = logits.view(*rows.shape[:2], -1)
        else:
            logits = self.lm_head(rows)
        return logits.to(torch.float32)


class Backbone(nn.Module):
    """Embedding, layers and final norm: everything below the head."""

    def __init__(self, embed_tokens: Embedding, layers: Sequence[nn.Module], norm: RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class Decoder(nn.Module):
    """The whole model. Parameter names are those of the graphs' initializers.

    Attributes:
        config: What the model is.
        precision: Its element types.
        layer_kinds: For each layer the name of its kind; layers of one kind differ in weights alone.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        layers: Sequence[nn.Module],
        layer_kinds: Sequence[str],
    ) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = config.hidden_size
        self.precision = precision
        self.layer_kinds = tuple(layer_kinds)
        compute = precision.compute
        embed_tokens = Embedding(config.vocab_size, config.hidden_size, compute)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, compute)
        self.model = Backbone(embed_tokens, layers, norm)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size, False, compute)

    @property
    def kv_shapes(self) -> list[tuple[int, int]]:
        """(K, D) of each layer's cache."""
        return [(self.config.num_key_value_heads, self.config.head_dim)] * len(self.layer_kinds)

    @property
    def takes_new_length(self) -> bool:
        """Whether the rotary frequencies depend on a sequence's total length."""
        return self.config.rope.depends_on_length

    @property
    def constants(self) -> dict[str, Tensor]:
        """What the prelude takes beside inputs, by argument name: values that the config determines."""
        if self.takes_new_length:
            return {}
        return {"frequencies": inverse_frequencies(self.config.rope, self.config.head_dim)}

    def prelude(self) -> Prelude:
        """The piece before the layers; parameter names are relative to `model.`."""
        return Prelude(self.config, self.model.embed_tokens, self.precision)

    def head(self) -> Head:
        """The piece after the layers; parameter names are relative to `model.`, except `lm_head`."""
        return Head(self.model.norm, self.lm_head, self.model.embed_tokens)

    def forward(
        self,
        input_ids: Tensor,
        past_length: Tensor,
        past_key_values: Sequence[tuple[Tensor, Tensor]],
        logit_positions: Tensor | None = None,
        new_length: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], list[Tensor]]:
        """One step of the graph contract in eager torch.

        Returns:
            Logits [B, N, V] float32, the new buffers of each layer, and the residual stream before each layer and
            after the last, num_layers + 1 x [B, S, E].
        """
        first_key = past_key_values[0][0]
        prelude = self.prelude()
        hidden, *shared = prelude(input_ids, past_length, first_key, **self.constants, new_length=new_length)
        stream, presents = [hidden], []
        for layer, (past_key, past_value) in zip(self.model.layers, past_key_values, strict=True):
            hidden, key, value = layer(hidden, past_length, past_key, past_value, *shared)
            presents.append((key, value))
            stream.append(hidden)
        return self.head()(hidden, logit_positions), presents, stream
