"""A float bundle that runs a layer at a time: memory holds one layer's weights and the activations of one batch.

The residual stream of all sequences waits on disk between layers, a file for each batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import (
    INPUT_IDS,
    LOGIT_POSITIONS,
    NEW_LENGTH,
    PAST_LENGTH,
    hidden_state,
)
from kvgraph.quant.bundle_weights import BundleWeights, as_float32
from kvgraph.quant.calibration_data import CalibrationData
from kvgraph.quant.formats import Floats
from kvgraph.quant.layer_graph import EMBEDDING_TABLE, LayeredGraph, Piece
from kvgraph.runtime.ort_load import import_onnxruntime, session_options
from kvgraph.runtime.session import Ids
from kvgraph.runtime.threads import Threads

# Activations of one call; a longer sequence makes a call of its own.
_TOKENS_PER_CALL = 2048


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that run together.

    Attributes:
        index: Which batch.
        ids: [B, S] int64, padded on the right with 0.
        lengths: [B] int64.
        first_token: How many tokens the batches before it have.
    """

    index: int
    ids: Ids
    lengths: Ids
    first_token: int

    @property
    def valid(self) -> NDArray[np.bool_]:
        """[B * S], False for padding."""
        columns = np.arange(self.ids.shape[1])
        result: NDArray[np.bool_] = (columns < self.lengths[:, None]).reshape(-1)
        return result

    def rows(self, activation: Floats) -> Floats:
        """[..., I] of all tokens of the batch, in order, as [tokens, I] without those of padding."""
        flat, valid = activation.reshape(-1, activation.shape[-1]), self.valid
        assert len(flat) == len(valid), f"{activation.shape} for {self.ids.shape} tokens"
        return flat if valid.all() else flat[valid]

    def cache_rows(self, buffer: Floats) -> Floats:
        """A cache [B, K, S, D] as [tokens, K, D], without padding."""
        slots = buffer[:, :, : self.ids.shape[1]].transpose(0, 2, 1, 3)
        return slots.reshape(-1, *slots.shape[2:])[self.valid]


def make_batches(data: CalibrationData) -> tuple[Batch, ...]:
    """The sequences in groups of about `_TOKENS_PER_CALL` tokens with little padding: they come longest first."""
    batches: list[Batch] = []
    start, tokens = 0, 0
    while start < len(data.sequences):
        longest = len(data.sequences[start])
        group = data.sequences[start : start + max(1, _TOKENS_PER_CALL // longest)]
        ids = np.zeros((len(group), longest), np.int64)
        for row, sequence in enumerate(group):
            ids[row, : len(sequence)] = sequence
        lengths = np.array([len(sequence) for sequence in group])
        batches.append(Batch(len(batches), ids, lengths, tokens))
        start, tokens = start + len(group), tokens + int(lengths.sum())
    return tuple(batches)


class PieceRunner:
    """A piece of the graph under ONNX Runtime on the CPU."""

    def __init__(self, piece: Piece) -> None:
        onnxruntime = import_onnxruntime()
        self.piece = piece
        self._session = onnxruntime.InferenceSession(
            piece.serialize(),
            session_options(Threads(), mapped_weights=False),
            providers=["CPUExecutionProvider"],
        )

    def __call__(
        self, feeds: Mapping[str, NDArray[Any]], wanted: Sequence[str] | None = None
    ) -> dict[str, NDArray[Any]]:
        """Its outputs by name, or those that are wanted."""
        names = list(self.piece.outputs if wanted is None else wanted)
        return dict(zip(names, self._session.run(names, dict(feeds)), strict=True))


class Stream:
    """The residual stream of every batch before one layer, on disk."""

    def __init__(self, directory: Path, layer: int) -> None:
        self.layer = layer
        self._directory = directory / f"stream.{layer}"

    def exists(self) -> bool:
        """Whether it is there, complete or not."""
        return self._directory.is_dir()

    def write(self, batch: Batch, hidden: Floats) -> None:
        """Keep a batch's [B, S, E]."""
        self._directory.mkdir(parents=True, exist_ok=True)
        np.save(self._directory / f"{batch.index}.npy", hidden)

    def read(self, batch: Batch) -> Floats:
        """A batch's [B, S, E] float32."""
        hidden: Floats = np.load(self._directory / f"{batch.index}.npy")
        return hidden

    def remove(self) -> None:
        """Give its space back."""
        shutil.rmtree(self._directory, ignore_errors=True)


# What is done with each batch's outputs of a piece.
Visit = Callable[[Batch, Mapping[str, NDArray[Any]]], None]


class LayerwiseModel:
    """A bundle and the sequences that run through it.

    Args:
        bundle: A float bundle.
        weights: Its open weights file.
        data: The sequences.

    Raises:
        ValueError: The bundle is quantized.
    """

    def __init__(self, bundle: Bundle, weights: BundleWeights, data: CalibrationData) -> None:
        if bundle.recipe is not None:
            raise ValueError(
                f"{bundle.path}: is quantized; calibrate and quantize the float bundle it came from"
            )
        self.bundle = bundle
        self.weights = weights
        self.data = data
        self.batches = make_batches(data)
        self.graph = LayeredGraph(
            ir.load(bundle.graph_path("prefill")), bundle.weights.keys(), bundle.contract.num_layers
        )
        self._state = {tensor.name: tensor for tensor in bundle.contract.state}
        self._shared = PieceRunner(self.graph.shared_values())

    def layer_weights(self, piece: Piece) -> dict[str, Floats]:
        """The bundle's own weights of a piece, in float32."""
        return {name: as_float32(self.weights.read(name)) for name in piece.parameters}

    def embed(self, stream: Stream) -> None:
        """Write the stream that enters the first layer."""
        piece = self.graph.embedding()
        run = PieceRunner(piece)
        others = [name for name in piece.parameters if name != EMBEDDING_TABLE]
        weights = {name: as_float32(self.weights.read(name)) for name in others}
        for batch in self.batches:
            # The rows in use in place of the whole table, which may be larger than all that comes after it.
            used, places = np.unique(batch.ids, return_inverse=True)
            table = np.concatenate(
                [self.weights.read(EMBEDDING_TABLE, row, row + 1) for row in used.tolist()]
            )
            feeds = {**self._inputs(piece, batch, {}), INPUT_IDS: places.reshape(batch.ids.shape)}
            outputs = run({**feeds, **weights, EMBEDDING_TABLE: as_float32(table)})
            stream.write(batch, outputs[hidden_state(0)])

    def run(
        self,
        piece: Piece,
        weights: Mapping[str, Floats],
        source: Stream,
        visit: Visit | None = None,
        target: Stream | None = None,
    ) -> None:
        """Run a layer, or the head, over every batch.

        Args:
            piece: From `graph`.
            weights: Value of each of its parameters.
            source: The stream that enters it.
            visit: Sees each batch's outputs.
            target: Where the stream that leaves it is written.
        """
        run = PieceRunner(piece)
        for batch in self.batches:
            outputs = self.run_batch(run, weights, batch, source.read(batch))
            if visit is not None:
                visit(batch, outputs)
            if target is not None:
                target.write(batch, outputs[hidden_state(target.layer)])

    def run_batch(
        self,
        run: PieceRunner,
        weights: Mapping[str, Floats],
        batch: Batch,
        hidden: Floats,
        wanted: Sequence[str] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Outputs of a piece, all or those that are wanted, for a batch with the stream [B, S, E]."""
        return run({**self._inputs(run.piece, batch, {run.piece.stream: hidden}), **weights}, wanted)

    def shared_values(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """What the layers share for a batch: masks, angles."""
        piece = self._shared.piece
        return self._shared({**self._whole_inputs(piece, batch), **self.layer_weights(piece)})

    def _inputs(
        self, piece: Piece, batch: Batch, given: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Values for what a piece reads beside weights."""
        feeds = {**given, **self._whole_inputs(piece, batch)}
        if any(name in self.graph.shared for name in piece.inputs):
            feeds |= self.shared_values(batch)
        return {name: feeds[name] for name in piece.inputs}

    def _whole_inputs(self, piece: Piece, batch: Batch) -> dict[str, NDArray[Any]]:
        """Those of the whole graph's inputs that a piece reads; the cache is empty."""
        rows, length = batch.ids.shape
        given = {
            INPUT_IDS: batch.ids,
            PAST_LENGTH: np.zeros(rows, np.int64),
            NEW_LENGTH: batch.lengths,
            LOGIT_POSITIONS: np.tile(np.arange(length), (rows, 1)),
        }
        feeds: dict[str, NDArray[Any]] = {name: given[name] for name in piece.inputs if name in given}
        caches = [name for name in piece.inputs if name in self._state]
        return feeds | {name: self._empty_cache(name, rows, length) for name in caches}

    def _empty_cache(self, name: str, rows: int, length: int) -> Floats:
        _, heads, slots, head_dim = self._state[name].shape
        capacity = slots if isinstance(slots, int) else length
        return np.zeros((rows, int(heads), capacity, int(head_dim)), np.float32)
