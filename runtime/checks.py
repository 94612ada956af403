"""Checks of what reaches a session, made before any runtime sees it.

Runtimes read a token id out of range as a wild address and a write position past the end as somebody else's
memory; the messages here come instead. The checks run at every step, so they cost microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvgraph.export.contract import (
    ENCODER_LENGTH,
    INPUT_IDS,
    LOGIT_POSITIONS,
    NEW_LENGTH,
    PAST_LENGTH,
    Contract,
    EncoderContract,
)
from kvgraph.runtime.session import Ids


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Checked inputs of one call, each C-contiguous int64 and ready to bind.

    Attributes:
        input_ids: [B, S].
        past_length: [B].
        logit_positions: [B, N], or None in decode.
        new_length: [B], or None where the graphs do not take it.
    """

    input_ids: Ids
    past_length: Ids
    logit_positions: Ids | None
    new_length: Ids | None


@dataclass(frozen=True, slots=True)
class SourceInputs:
    """Checked inputs of the encoder, each C-contiguous int64 and ready to bind.

    Attributes:
        input_ids: [N, C].
        encoder_length: [N].
    """

    input_ids: Ids
    encoder_length: Ids


def check_source(encoder: EncoderContract, input_ids: ArrayLike, encoder_length: ArrayLike) -> SourceInputs:
    """Sources in the form that the encoder's graph takes.

    Args:
        encoder: Of the graph that will run.
        input_ids: [N, C], 0 <= id < the source's vocabulary; C at most the encoder's positions.
        encoder_length: [N], 1 <= length <= C.

    Raises:
        TypeError: An array is not of an integer type.
        ValueError: A shape or a value is out of its range.
    """
    num_sources = (*np.shape(input_ids), 0)[0]
    ids = _integers(INPUT_IDS, input_ids, 2, num_sources)
    _check_range(INPUT_IDS, ids, encoder.vocab_size, "the source's vocabulary")
    if ids.shape[1] > encoder.max_positions:
        raise ValueError(
            f"the sources have {ids.shape[1]} tokens a row, the encoder takes {encoder.max_positions}; shorten them"
        )
    lengths = _integers(ENCODER_LENGTH, encoder_length, 1, len(ids), "there are {} sources")
    wrong = (lengths < 1) | (lengths > ids.shape[1])
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{ENCODER_LENGTH}[{row}] is {lengths[row]}, expected 1 to {ids.shape[1]}")
    return SourceInputs(ids, lengths)


def check_source_of_row(source_of_row: ArrayLike | None, num_sources: int, batch_size: int) -> Ids:
    """Which source each row of a cache reads, [B] int64; default each its own.

    Raises:
        TypeError: They are no integers.
        ValueError: There are not as many sources as rows, or one is out of range.
    """
    if source_of_row is None:
        if num_sources != batch_size:
            raise ValueError(
                f"there are {num_sources} sources and {batch_size} rows; say with source_of_row which reads which"
            )
        return np.arange(batch_size)
    rows = _integers("source_of_row", source_of_row, 1, batch_size)
    if rows.min() < 0 or rows.max() >= num_sources:
        raise ValueError(f"source_of_row holds {rows.tolist()}, expected 0 <= row < {num_sources} sources")
    return rows


def check_step(
    contract: Contract,
    batch_size: int,
    slots: int,
    input_ids: ArrayLike,
    past_length: ArrayLike,
    logit_positions: ArrayLike | None = None,
    new_length: ArrayLike | None = None,
) -> StepInputs:
    """The inputs of a prefill (with `logit_positions`) or a decode (without) in the form that graphs take.

    Any integer type and any strides are accepted and converted; nothing is copied that is already right.

    Args:
        contract: Of the graphs that will run.
        batch_size: B of the cache.
        slots: The most slots that a row of the cache may have, `Cache.limit`.
        input_ids: [B, S], 0 <= id < V.
        past_length: [B], 0 <= past_length and past_length + S <= slots.
        logit_positions: [B, N], 0 <= position < S.
        new_length: [B], 1 <= new_length and past_length + new_length <= slots; default S for every row.

    Raises:
        TypeError: An array is not of an integer type.
        ValueError: A shape or a value is out of its range.
    """
    ids = _integers(INPUT_IDS, input_ids, 2, batch_size)
    new_tokens = ids.shape[1]
    if logit_positions is None and new_tokens != 1:
        raise ValueError(
            f"{INPUT_IDS} has {new_tokens} tokens a row, decode takes 1; run several tokens through prefill"
        )
    _check_range(INPUT_IDS, ids, contract.vocab_size, "the vocabulary")
    past = _integers(PAST_LENGTH, past_length, 1, batch_size)
    _check_room(PAST_LENGTH, past, new_tokens, slots)
    positions = None
    if logit_positions is not None:
        positions = _integers(LOGIT_POSITIONS, logit_positions, 2, batch_size)
        _check_range(LOGIT_POSITIONS, positions, new_tokens, "the new tokens")
    gained = None
    if contract.takes_new_length:
        gained = _new_length(new_length, past, new_tokens, slots)
    return StepInputs(ids, past, positions, gained)


_OWN_ROWS = "the cache has {}; a row that takes no part still passes a valid id and its own length"


def _integers(name: str, values: ArrayLike, rank: int, batch_size: int, rows: str = _OWN_ROWS) -> Ids:
    """`values` as contiguous int64 with `rank` dimensions, the first of `batch_size`, none of them empty.

    `rows` is what the message says that there are `batch_size` of.
    """
    array = np.asarray(values)
    if array.dtype != np.int64:
        array = _to_int64(name, array)
    if array.ndim != rank:
        letters = "[B, S]" if name == INPUT_IDS else "[B, N]" if rank == 2 else "[B]"
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {rank} dimensions, {letters}")
    if array.shape[0] != batch_size:
        raise ValueError(f"{name} has {array.shape[0]} rows, {rows.format(batch_size)}")
    if array.size == 0:
        raise ValueError(f"{name} is empty, shape {list(array.shape)}; give at least one token a row")
    return np.ascontiguousarray(array)


def _to_int64(name: str, array: NDArray[np.generic]) -> Ids:
    if array.size == 0:
        raise ValueError(f"{name} is empty, shape {list(array.shape)}; give at least one token a row")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} is {array.dtype}, expected int64 (or another integer type)")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds {array.max()}, which int64 cannot hold")
    return array.astype(np.int64)


def _check_range(name: str, array: Ids, stop: int, of_what: str) -> None:
    # As unsigned numbers the negative ones are huge: one reduction finds both ends.
    if int(array.view(np.uint64).max()) < stop:
        return
    row, column = np.argwhere((array < 0) | (array >= stop))[0]
    raise ValueError(
        f"{name}[{row}, {column}] is {array[row, column]}, expected 0 <= value < {stop} ({of_what})"
    )


def _check_room(name: str, past: Ids, new_tokens: int, slots: int) -> None:
    if int(past.view(np.uint64).max()) + new_tokens <= slots:
        return
    row = int(np.argmax(past < 0)) if past.min() < 0 else int(np.argmax(past))
    if past[row] < 0:
        raise ValueError(f"{name}[{row}] is {past[row]}, expected 0 or more")
    raise ValueError(
        f"row {row} has {past[row]} tokens in the cache and {new_tokens} more (padding included) make "
        f"{past[row] + new_tokens}, the cache allows {slots}; shorten the prompt or allocate a larger cache"
    )


def _new_length(new_length: ArrayLike | None, past: Ids, new_tokens: int, slots: int) -> Ids:
    if new_length is None:
        return np.full(past.shape, new_tokens, np.int64)
    gained = _integers(NEW_LENGTH, new_length, 1, past.shape[0])
    too_long = past + gained > slots
    wrong = (gained < 1) | too_long
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{NEW_LENGTH}[{row}] is {gained[row]} with {past[row]} tokens in the cache, "
            f"expected at least 1 and at most {slots - past[row]} (the cache allows {slots})"
        )
    return gained
