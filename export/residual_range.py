"""How large the residual stream of a checkpoint becomes, in float32, on tokens that are given.

`residual_range` reads the checkpoint a layer at a time, for `kvgraph export --sample-text`; `session_residual_range`
asks a session that holds all of it already, for `kvgraph compare`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from kvgraph.export.parameter_rows import ParameterRows
from kvgraph.export.weight_bytes import check_tied
from kvgraph.float16_range import ResidualPeak, find_overflow, residual_peak
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import WeightPlan, plan_weights
from kvgraph.models.weights import WeightStream
from kvgraph.runtime.session import Session

_FLOAT32 = Precision(torch.float32, torch.float32)


def require_float16_range(checkpoint: Checkpoint, sequences: Sequence[ArrayLike], dtype: str) -> None:
    """Refuse a checkpoint whose residual stream float16 does not hold.

    Args:
        checkpoint: From `open_checkpoint`.
        sequences: Token ids of each row.
        dtype: Type of weights and activations that is to be exported.

    Raises:
        ValueError: The stream leaves float16's range, or see `residual_range`.
    """
    overflow = find_overflow(residual_range(checkpoint, sequences), dtype)
    if overflow is not None:
        raise ValueError(f"{checkpoint.source.name}: {overflow.describe()}")


@torch.no_grad()
def residual_range(checkpoint: Checkpoint, sequences: Sequence[ArrayLike]) -> tuple[ResidualPeak, ...]:
    """The peak of the residual stream before each layer and after the last, num_layers + 1.

    Memory holds one layer's weights in float32 beside the activations; the embedding table is let go before them.

    Args:
        checkpoint: From `open_checkpoint`, with its weights.
        sequences: Token ids of each row, each run by itself from its first token on.

    Raises:
        ValueError: The checkpoint has an encoder, is damaged or does not fit its config, or a row does not fit it.
    """
    config = checkpoint.config
    with torch.device("meta"):
        model = family(config.model_type).build(config, _FLOAT32)
    if not isinstance(model, Decoder):
        raise ValueError(
            f"{checkpoint.source.name}: the residual stream is measured of models without an encoder, "
            f"{config.model_type} has one; leave out the sample text"
        )
    rows = [_checked(ids, config.vocab_size, config.max_positions) for ids in sequences]
    stream = checkpoint.weights()
    plan = plan_weights(family(config.model_type), model, stream.names)
    stream.check(plan.shapes, plan.ignorable)
    check_tied(stream, plan)
    with _Loaded(model, "prelude", stream, plan):
        states = [_prelude(model, ids) for ids in rows]
    peaks = [residual_peak(0, [hidden[0].numpy() for hidden, _ in states])]
    for index in range(len(model.layers)):
        with _Loaded(model, f"layers.{index}", stream, plan):
            states = [(_layer(model, index, hidden, shared), shared) for hidden, shared in states]
        peaks.append(residual_peak(index + 1, [hidden[0].numpy() for hidden, _ in states]))
    return tuple(peaks)


def session_residual_range(session: Session, sequences: Sequence[ArrayLike]) -> tuple[ResidualPeak, ...]:
    """As `residual_range`, of a session in float32 that offers its hidden states."""
    found = []
    for sequence in sequences:
        ids = np.asarray(sequence, np.int64)[None]
        zero = np.zeros(1, np.int64)
        session.prefill(session.allocate_cache(1, ids.shape[1]), ids, zero, np.array([[ids.shape[1] - 1]]))
        found.append([hidden[0] for hidden in session.hidden_states()])
    places = range(session.contract.num_layers + 1)
    return tuple(residual_peak(place, [row[place] for row in found]) for place in places)


def _checked(ids: ArrayLike, vocab_size: int, max_positions: int) -> Tensor:
    """A row as [1, S] int64."""
    row = np.asarray(ids, np.int64)
    if row.ndim != 1 or not 1 <= len(row) <= max_positions:
        raise ValueError(f"a row of token ids has shape {row.shape}, expected 1 to {max_positions} tokens")
    if row.min() < 0 or row.max() >= vocab_size:
        raise ValueError(f"token ids range from {row.min()} to {row.max()}, expected 0 to {vocab_size - 1}")
    return torch.from_numpy(row)[None]


def _prelude(model: Decoder, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The stream that enters the first layer, [1, S, E], and what layers share."""
    keys, _ = _empty_cache(model, 0, ids.shape[1])
    hidden, *tensors = model.prelude(
        ids, torch.zeros(1, dtype=torch.int64), keys, torch.tensor([ids.shape[1]]), **model.prelude.constants
    )
    return hidden, dict(zip(model.prelude.shared_names, tensors, strict=True))


def _layer(model: Decoder, index: int, hidden: Tensor, shared: dict[str, Tensor]) -> Tensor:
    """What leaves a layer, [1, S, E]."""
    past = _empty_cache(model, index, hidden.shape[1])
    tensors = (shared[name] for name in model.layer_shared[index])
    result: Tensor = model.layers[index](hidden, torch.zeros(1, dtype=torch.int64), *past, *tensors)[0]
    return result


def _empty_cache(model: Decoder, index: int, slots: int) -> tuple[Tensor, Tensor]:
    heads, size = model.kv_shapes[index]
    return torch.zeros(1, heads, slots, size), torch.zeros(1, heads, slots, size)


class _Loaded:
    """Holds the weights of one piece of a model on the meta device, within a `with` block."""

    def __init__(self, model: Decoder, piece: str, stream: WeightStream, plan: WeightPlan) -> None:
        self._model, self._rows = model, ParameterRows(stream, plan.sources)
        self._paths = [
            path for path, _ in model.named_parameters(remove_duplicate=False) if path.startswith(f"{piece}.")
        ]

    def __enter__(self) -> None:
        names = self._model.names()
        for path in self._paths:
            unset, name = self._model.get_parameter(path), names[path]
            self._set(path, torch.cat(list(self._rows.pieces(name, unset.dtype))).view(unset.shape))

    def __exit__(self, *_: object) -> None:
        for path in self._paths:
            self._set(path, self._model.get_parameter(path).to("meta"))

    def _set(self, path: str, value: Tensor) -> None:
        owner, _, attribute = path.rpartition(".")
        setattr(self._model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
