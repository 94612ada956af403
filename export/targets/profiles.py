"""Optimization profiles: the range of shapes that an engine is built for, one profile for each graph it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvgraph.export.contract import (
    BATCH,
    CONTEXT_LENGTH,
    LOGIT_ROWS,
    NEW_TOKENS,
    SOURCE_TOKENS,
    Contract,
    GraphName,
    TensorSpec,
)
from kvgraph.runtime.target import Limits

# Smallest, usual and largest shape of an input; for a shape input the same of its values.
Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

# Where the capacity is left to choose, a cache of a long-context model would fill the GPU by itself.
_DEFAULT_CONTEXT, _DEFAULT_CHUNK = 4096, 512


def choose_limits(
    contract: Contract,
    max_batch: int | None,
    max_context: int | None,
    prefill_chunk: int | None,
    max_source: int | None = None,
) -> Limits:
    """Limits from what was asked for, the rest by default: 1 row, at most 4096 slots, chunks of at most 512 tokens.

    Sources are as long by default as chunks: at most 512 tokens.

    Raises:
        ValueError: A limit is out of its range, or differs from a capacity that the graphs have written in.
    """
    batch = 1 if max_batch is None else max_batch
    if batch < 1:
        raise ValueError(f"--max-batch is {batch}, expected 1 or more")
    most = contract.capacity or contract.max_positions
    context = max_context
    if context is None:
        context = contract.capacity or min(contract.max_positions, _DEFAULT_CONTEXT)
    if contract.capacity is not None and context != contract.capacity:
        raise ValueError(
            f"--max-context is {context}, the bundle has a capacity of {contract.capacity} written in; "
            "leave the flag out, or export without --capacity"
        )
    if not 2 <= context <= most:
        raise ValueError(f"--max-context is {context}, expected 2 to {most}, the positions of the model")
    chunk = min(context, _DEFAULT_CHUNK) if prefill_chunk is None else prefill_chunk
    if not 1 <= chunk <= context:
        raise ValueError(f"--prefill-chunk is {chunk}, expected 1 to {context}, the cache's slots")
    return Limits(batch, context, chunk, _choose_source(contract, max_source))


def _choose_source(contract: Contract, asked: int | None) -> int | None:
    if contract.encoder is None:
        if asked is not None:
            raise ValueError(f"--max-source is {asked}, the model has no encoder; leave it out")
        return None
    most = contract.encoder.max_positions
    source = min(most, _DEFAULT_CHUNK) if asked is None else asked
    if not 2 <= source <= most:
        raise ValueError(f"--max-source is {source}, expected 2 to {most}, the positions of the encoder")
    return source


def profile_shapes(inputs: Sequence[TensorSpec], runs: GraphName, limits: Limits) -> dict[str, Range]:
    """The shapes that each input may have while the engine runs as `runs`.

    Args:
        inputs: Of the engine, with the capacity bound.
        runs: "decode" takes one new token and gives one row of logits, whichever graph the engine is made from.
        limits: The largest sizes.
    """
    chunk = limits.prefill_chunk if runs == "prefill" else 1
    # A profile of exactly one row of one token makes TensorRT-RTX 1.7 lay out the weights for it anew, and the engine
    # then holds them twice (measured). A range of two rows shares them with the other profile.
    most_rows = max(2, limits.max_batch)
    ranges: Mapping[str, tuple[int, int, int]] = {
        BATCH: (1, limits.max_batch, most_rows),
        NEW_TOKENS: (1, chunk, chunk),
        # Generation asks for the last token's row, a scored text for all of them.
        LOGIT_ROWS: (1, 1, chunk),
    }
    if limits.max_source is not None:
        ranges = {**ranges, SOURCE_TOKENS: (1, limits.max_source, limits.max_source)}
    shapes: dict[str, Range] = {}
    for tensor in inputs:
        if tensor.name == CONTEXT_LENGTH:
            shapes[tensor.name] = ((1,), (limits.max_context,), (limits.max_context,))
            continue
        dims = [(dim,) * 3 if isinstance(dim, int) else ranges[dim] for dim in tensor.shape]
        shapes[tensor.name] = (
            tuple(dim[0] for dim in dims),
            tuple(dim[1] for dim in dims),
            tuple(dim[2] for dim in dims),
        )
    return shapes
