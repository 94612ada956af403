"""Checkpoint tensors in the form that the graphs store: converted, transposed, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvgraph.models.sources import WeightPlan, WeightSource
from kvgraph.models.weights import WeightStream

PIECE_BYTES = 32 << 20


def weight_pieces(
    stream: WeightStream, parameter: str, source: WeightSource, dtype: torch.dtype
) -> Iterator[Tensor]:
    """A parameter's rows in order, in pieces of about `PIECE_BYTES`, as `dtype`.

    A tensor that is stored the other way round is read whole, since its rows are the source's columns; any other is
    read a piece at a time.

    Raises:
        ValueError: A value of the checkpoint is not finite, or overflows `dtype`.
    """
    rows = source.shape[-1] if source.transpose else source.shape[0]
    row_bytes = torch.Size(source.shape).numel() // rows * max(dtype.itemsize, 4)
    step = max(1, PIECE_BYTES // row_bytes)
    whole = stream.read_rows(source.name, 0, source.shape[0]) if source.transpose else None
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        piece = stream.read_rows(source.name, start, stop) if whole is None else whole[:, start:stop].T
        converted = piece.to(dtype).contiguous()
        if dtype == torch.float16 and converted.isinf().any():
            raise ValueError(
                f"{parameter}: holds {piece.abs().max().item():g}, more than float16's 65504; "
                "export with --dtype bfloat16 or float32"
            )
        yield converted


def as_bytes(pieces: Iterator[Tensor]) -> Iterator[memoryview]:
    """The memory of each piece."""
    for piece in pieces:
        yield piece.reshape(-1).view(torch.uint8).numpy().data


def check_tied(stream: WeightStream, plan: WeightPlan) -> None:
    """A tied matrix that the checkpoint holds all the same must repeat the one it is tied to.

    Raises:
        ValueError: The two differ: the config says one thing and the file another.
    """
    for name, parameter in plan.tied.items():
        if name not in stream.names:
            continue
        original, copy = plan.sources[parameter], stream.spec(name)
        equal = copy.shape == original.shape
        step = max(1, PIECE_BYTES // (4 * original.shape[-1]))
        for start in range(0, original.shape[0], step):
            stop = min(start + step, original.shape[0])
            equal = equal and torch.equal(
                stream.read_rows(name, start, stop), stream.read_rows(original.name, start, stop)
            )
        if not equal:
            raise ValueError(
                f"{copy.file}: {name!r} differs from {original.name!r}, but config.json says tie_word_embeddings; "
                "set it to false to use the separate head, or remove the tensor"
            )
