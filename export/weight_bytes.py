"""Checkpoint tensors on their way to a file: one core for each, their bytes, and copies that must agree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvgraph.export.parameter_rows import PIECE_BYTES
from kvgraph.models.sources import WeightPlan
from kvgraph.models.weights import WeightStream


@contextmanager
def one_thread() -> Iterator[None]:
    """Convert on one core: the others write and hash meanwhile, and pieces are too small to share (twice the time)."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def as_bytes(pieces: Iterator[Tensor]) -> Iterator[memoryview]:
    """The memory of each piece."""
    for piece in pieces:
        yield piece.reshape(-1).view(torch.uint8).numpy().data


def check_tied(stream: WeightStream, plan: WeightPlan) -> None:
    """A tied matrix that the checkpoint holds all the same must repeat the one it is tied to.

    Raises:
        ValueError: The two differ: the config says one thing and the file another.
    """
    for name, original_name in plan.tied.items():
        if name not in stream.names:
            continue
        original, copy = stream.spec(original_name), stream.spec(name)
        equal = copy.shape == original.shape
        step = max(1, PIECE_BYTES // (4 * original.shape[-1]))
        for start in range(0, original.shape[0], step):
            stop = min(start + step, original.shape[0])
            equal = equal and torch.equal(
                stream.read_rows(name, start, stop), stream.read_rows(original_name, start, stop)
            )
        if not equal:
            raise ValueError(
                f"{copy.file}: {name!r} differs from {original_name!r}, but config.json says tie_word_embeddings; "
                "set it to false to use the separate head, or remove the tensor"
            )
