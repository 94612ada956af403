"""A decoder-only model as three pieces that are traced apart: prelude, layer, head.

`Prelude` turns ids and positions into the residual stream and what layers share (rotary angles, masks); a layer adds
to the stream and updates its cache; `Head` turns rows of the stream into logits. The exporter traces each piece once
per kind of layer; `Decoder.forward` is the same pieces in eager torch, the reference of every comparison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvgraph.models import ops
from kvgraph.models.config import ModelConfig
from kvgraph.models.layers import Embedding, Linear, Precision
from kvgraph.models.positions import Shared, Step


class DecoderLayer(nn.Module):
    """What the decoder asks of a layer.

    Its `forward` is (hidden_states [B, S, E], past_length [B], past_key [B, K, T, D], past_value, *shared) ->
    (hidden_states [B, S, E], present_key, present_value).

    Attributes:
        kind: Layers of one kind differ in their weights alone; one of them is traced for all.
        shared: Which of the prelude's tensors the layer takes, in order.
        kv_shape: (K, D) of its cache.
    """

    kind = "full_attention"
    shared: tuple[str, ...] = ("mask", "cos", "sin")
    kv_shape: tuple[int, int]


class Prelude(nn.Module):
    """Ids and positions to the residual stream, and to what layers share."""

    def __init__(
        self,
        embed_tokens: Embedding,
        shared: Sequence[Shared],
        residual: torch.dtype,
        embedding_scale: float = 1.0,
    ) -> None:
        """Embed with `embed_tokens`, times `embedding_scale`, into a stream of type `residual`."""
        super().__init__()
        self.embed_tokens = embed_tokens
        self.shared = tuple(shared)
        self.residual = residual
        self.embedding_scale = embedding_scale
        self.shared_names = tuple(name for part in self.shared for name in part.names)
        self.takes_new_length = any(part.needs_total_length for part in self.shared)

    @property
    def constants(self) -> dict[str, Tensor]:
        """What `forward` takes beside inputs: values that the config determines."""
        return {name: value for part in self.shared for name, value in part.constants.items()}

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The stream that enters the first layer, [B, S, E]; positions [B, S] are for families that embed them."""
        rows: Tensor = self.embed_tokens(input_ids)
        if self.embedding_scale != 1.0:
            rows = rows * self.embedding_scale
        return rows.to(self.residual)

    def forward(
        self,
        input_ids: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        new_length: Tensor | None = None,
        **constants: Tensor,
    ) -> tuple[Tensor, ...]:
        """What the layers read.

        Args:
            input_ids: [B, S] int64.
            past_length: [B] int64.
            past_key: [B, K, T, D], read for T alone.
            new_length: [B] int64, where `takes_new_length`.
            **constants: `self.constants`, as inputs so that a trace does not compute them.

        Returns:
            The stream [B, S, E], then one tensor for each of `shared_names`.
        """
        positions = past_length.unsqueeze(1) + torch.arange(input_ids.shape[1], device=input_ids.device)
        slots = torch.arange(past_key.shape[2], device=input_ids.device)
        total = None if new_length is None else past_length + new_length
        step = Step(positions, slots, total, constants)
        return (self.embed(input_ids, positions), *(tensor for part in self.shared for tensor in part(step)))


class Head(nn.Module):
    """Rows of the residual stream to logits."""

    def __init__(
        self,
        norm: nn.Module,
        lm_head: Linear | None,
        embed_tokens: Embedding,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Norm, then `lm_head` or, tied, the embedding table; then logits * scale, then softcap * tanh(/ softcap)."""
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self.scale = scale
        self.softcap = softcap
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
        logits = logits.to(torch.float32)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


class Decoder(nn.Module):
    """The whole model.

    Attributes:
        config: What the model is.
        precision: Its element types.
        prelude: The piece before the layers.
        layers: The layers.
        head: The piece after the layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        precision: Precision,
        prelude: Prelude,
        layers: Sequence[DecoderLayer],
        head: Head,
    ) -> None:
        super().__init__()
        self.config = config
        self.precision = precision
        self.prelude = prelude
        self.layers = nn.ModuleList(layers)
        self.head = head
        self.layer_kinds = tuple(layer.kind for layer in layers)
        self.layer_shared = tuple(layer.shared for layer in layers)
        self.kv_shapes = tuple(layer.kv_shape for layer in layers)

    @property
    def layer_counts(self) -> dict[str, int]:
        """What stands for the layer in a family's map of names -> how many layers there are."""
        return {"{i}": len(self.layers)}

    def names(self) -> dict[str, str]:
        """Module path of every parameter -> its name in graphs."""
        return {path: graph_name(path) for path, _ in self.named_parameters(remove_duplicate=False)}

    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter under the name that graphs and bundles use, which is Llama's; a tied one once."""
        return {graph_name(name): parameter for name, parameter in self.named_parameters()}

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
        constants = self.prelude.constants
        hidden, *tensors = self.prelude(
            input_ids, past_length, past_key_values[0][0], new_length=new_length, **constants
        )
        shared = dict(zip(self.prelude.shared_names, tensors, strict=True))
        stream, presents = [hidden], []
        for layer, names, past in zip(self.layers, self.layer_shared, past_key_values, strict=True):
            hidden, key, value = layer(hidden, past_length, *past, *(shared[name] for name in names))
            presents.append((key, value))
            stream.append(hidden)
        return self.head(hidden, logit_positions), presents, stream


def graph_name(name: str) -> str:
    """A parameter's name in graphs and bundles: `prelude.x` and `head.x` become `model.x`, save for `lm_head`."""
    piece, rest = name.split(".", 1)
    if piece == "layers":
        return f"model.{name}"
    return rest if rest.startswith("lm_head.") else f"model.{rest}"
