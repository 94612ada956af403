"""An encoder-decoder model as pieces that are traced apart.

The encoder is a prelude, layers and a norm over a whole source, without a cache, followed by the projections to the
keys and values of the decoder's cross-attention: together the graph `encode`. The decoder is that of
`kvgraph.models.decoder`, with layers that take keys and values of the source, too, and a mask for them.

Names of parameters in graphs are those of a decoder-only model; the encoder's begin with `model.encoder.`, and all of
a layer's cross-attention is `model.layers.{i}.cross_attn`, wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvgraph.models.cross_attention import CrossMask, CrossProjection
from kvgraph.models.decoder import Decoder, Head, Prelude, graph_name
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig
from kvgraph.models.layers import Precision
from kvgraph.models.positions import Step

KeyValue = tuple[Tensor, Tensor]


class EncoderLayer(nn.Module):
    """What the encoder asks of a layer: `forward` is (hidden_states [B, C, E], *shared) -> [B, C, E].

    Attributes:
        kind: Layers of one kind differ in their weights alone.
        shared: Which of the prelude's tensors the layer takes, in order.
    """

    kind = "full_attention"
    shared: tuple[str, ...] = ("mask",)


class CrossDecoderLayer(nn.Module):
    """What the decoder asks of a layer.

    Its `forward` is (hidden_states [B, S, E], past_length [B], past_key [B, K, T, D], past_value,
    cross_key [B, K, C, D], cross_value, *shared) -> (hidden_states [B, S, E], present_key, present_value).

    Attributes:
        kind: See `kvgraph.models.decoder.DecoderLayer`.
        shared: Likewise; "cross_mask" is `CrossMask`'s.
        kv_shape: Likewise.
    """

    kind = "full_attention"
    shared: tuple[str, ...] = ("mask", "cross_mask")
    kv_shape: tuple[int, int]


class SourcePrelude(nn.Module):
    """A source's ids to the residual stream, and to what the encoder's layers share."""

    def __init__(self, prelude: Prelude) -> None:
        """`prelude` embeds; what it shares may ask for `Step.total_length`, the length of each source."""
        super().__init__()
        self.prelude = prelude

    def forward(self, input_ids: Tensor, encoder_length: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        """[B, C] int64 and [B] int64 to [B, C, E], then one tensor for each of the prelude's `shared_names`."""
        slots = torch.arange(input_ids.shape[1], device=input_ids.device)
        step = Step(slots.unsqueeze(0), slots, encoder_length, constants)
        shared = (tensor for part in self.prelude.shared for tensor in part(step))
        return (self.prelude.embed(input_ids, step.positions), *shared)


class Encoder(nn.Module):
    """What is run once for each source.

    Attributes:
        prelude: Embeds a source.
        layers: The layers.
        norm: What the last layer's result goes through; returns the compute type.
    """

    def __init__(self, prelude: Prelude, layers: Sequence[EncoderLayer], norm: nn.Module) -> None:
        super().__init__()
        self.prelude = prelude
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.layer_kinds = tuple(layer.kind for layer in layers)
        self.layer_shared = tuple(layer.shared for layer in layers)

    def forward(self, input_ids: Tensor, encoder_length: Tensor) -> Tensor:
        """[B, C] int64 and [B] int64 to [B, C, E]."""
        hidden, *tensors = SourcePrelude(self.prelude)(input_ids, encoder_length, **self.prelude.constants)
        shared = dict(zip(self.prelude.shared_names, tensors, strict=True))
        for layer, names in zip(self.layers, self.layer_shared, strict=True):
            hidden = layer(hidden, *(shared[name] for name in names))
        result: Tensor = self.norm(hidden)
        return result


class EncoderDecoder(nn.Module):
    """The whole model.

    Attributes:
        config: What the model is.
        precision: Its element types.
        prelude: The piece before the decoder's layers.
        layers: The decoder's layers.
        cross: For each of them, the projections to its cross-attention's keys and values.
        head: The piece after the decoder's layers.
        encoder: The encoder.
        cross_mask: What masks the source.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        precision: Precision,
        encoder: Encoder,
        prelude: Prelude,
        layers: Sequence[CrossDecoderLayer],
        cross: Sequence[CrossProjection],
        head: Head,
    ) -> None:
        super().__init__()
        self.config = config
        self.precision = precision
        # The decoder's pieces come first: a table that both sides read has the name that it has in other models.
        self.prelude = prelude
        self.layers = nn.ModuleList(layers)
        self.cross = nn.ModuleList(cross)
        self.head = head
        self.encoder = encoder
        self.cross_mask = CrossMask()
        self.layer_kinds = tuple(layer.kind for layer in layers)
        self.layer_shared = tuple(layer.shared for layer in layers)
        self.kv_shapes = tuple(layer.kv_shape for layer in layers)
        self.cross_shapes = tuple(projection.kv_shape for projection in cross)

    @property
    def layer_counts(self) -> dict[str, int]:
        """See `Decoder.layer_counts`; "{j}" counts the encoder's layers."""
        return {"{i}": len(self.layers), "{j}": len(self.encoder.layers)}

    def names(self) -> dict[str, str]:
        """Module path of every parameter -> its name in graphs; a shared one has several paths and one name."""
        first: dict[int, str] = {}
        for path, parameter in self.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), _graph_name(path))
        return {
            path: first[id(parameter)] for path, parameter in self.named_parameters(remove_duplicate=False)
        }

    def weights(self) -> dict[str, nn.Parameter]:
        """Every parameter under the name that graphs and bundles use; a shared one once."""
        names = self.names()
        return {names[path]: parameter for path, parameter in self.named_parameters()}

    def encode(self, input_ids: Tensor, encoder_length: Tensor) -> list[KeyValue]:
        """Keys and values [B, K, C, D] of each decoder layer's cross-attention, of sources [B, C] int64."""
        states = self.encoder(input_ids, encoder_length)
        return [projection(states) for projection in self.cross]

    def forward(
        self,
        input_ids: Tensor,
        past_length: Tensor,
        past_key_values: Sequence[KeyValue],
        cross: Sequence[KeyValue],
        encoder_length: Tensor,
        logit_positions: Tensor | None = None,
    ) -> tuple[Tensor, list[KeyValue], list[Tensor]]:
        """One step of the graph contract in eager torch, see `Decoder.forward`; `cross` is from `encode`."""
        hidden, *tensors = self.prelude(
            input_ids, past_length, past_key_values[0][0], **self.prelude.constants
        )
        shared = dict(zip(self.prelude.shared_names, tensors, strict=True))
        shared["cross_mask"] = self.cross_mask(input_ids, encoder_length, cross[0][0])
        stream, presents = [hidden], []
        for layer, names, past, source in zip(
            self.layers, self.layer_shared, past_key_values, cross, strict=True
        ):
            hidden, key, value = layer(hidden, past_length, *past, *source, *(shared[name] for name in names))
            presents.append((key, value))
            stream.append(hidden)
        return self.head(hidden, logit_positions), presents, stream


# What a family builds.
Model = Decoder | EncoderDecoder


def _graph_name(path: str) -> str:
    piece, rest = path.split(".", 1)
    if piece == "encoder":
        return f"model.encoder.{rest.removeprefix('prelude.')}"
    if piece == "cross":
        layer, rest = rest.split(".", 1)
        return f"model.layers.{layer}.cross_attn.{rest}"
    return graph_name(path)
