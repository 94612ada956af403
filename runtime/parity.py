"""Teacher-forced comparison of two sessions: the same tokens through both, every step's numbers side by side.

Each row of tokens is cut into a prefill and single tokens, and both sessions get these whatever they would have
chosen, so that an error cannot hide behind a different text. After every step the logits of all new tokens and
every layer's keys and values in use are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvgraph.export.contract import Contract, GraphName
from kvgraph.runtime.parity_bands import Band
from kvgraph.runtime.parity_metrics import TensorError, compare_logits, largest
from kvgraph.runtime.parity_report import ParityReport, StepReport
from kvgraph.runtime.session import Cache, Floats, Ids, Session

_FLOAT_CACHES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Step:
    """One call, for all rows.

    Attributes:
        index: Number of the call.
        graph: Which graph.
        input_ids: [B, S]; padding is id 0.
        past_length: [B].
        new_length: [B], what is left of each row's prefill, the chunk included.
        valid: [B], how many of the S tokens are the row's own.
    """

    index: int
    graph: GraphName
    input_ids: Ids
    past_length: Ids
    new_length: Ids
    valid: Ids

    @property
    def is_valid(self) -> NDArray[np.bool_]:
        """[B, S], which new tokens are not padding."""
        return np.arange(self.input_ids.shape[1]) < self.valid[:, None]

    @property
    def logit_positions(self) -> Ids:
        """[B, S], every new token."""
        batch, new_tokens = self.input_ids.shape
        return np.tile(np.arange(new_tokens, dtype=np.int64), (batch, 1))

    def run(self, session: Session, cache: Cache) -> Floats:
        """Logits of every new token, [B, S, V]."""
        if self.graph == "decode":
            return session.decode(cache, self.input_ids, self.past_length)
        return session.prefill(cache, self.input_ids, self.past_length, self.logit_positions, self.new_length)


def plan_steps(sequences: Sequence[ArrayLike], prefill: int, chunk: int | None = None) -> list[Step]:
    """The calls that put the rows of tokens through a session.

    Rows may differ in length. A row shorter than the prefill is padded on the right; one that has ended repeats its
    last token in place.

    Args:
        sequences: Token ids of each row.
        prefill: How many tokens of each row go through prefill; the others follow one by one.
        chunk: Most tokens of one prefill call, default all.

    Raises:
        ValueError: There are no tokens, or a number is below 1.
    """
    rows = [np.asarray(sequence, np.int64) for sequence in sequences]
    if not rows or any(row.ndim != 1 or not len(row) for row in rows):
        raise ValueError("expected one or more rows of token ids, each with at least one token")
    if prefill < 1 or (chunk is not None and chunk < 1):
        raise ValueError(f"prefill is {prefill} and chunk is {chunk}, expected 1 or more tokens")
    steps = [*_prefill_steps(rows, prefill, chunk or prefill), *_decode_steps(rows, prefill)]
    return [Step(index, *step) for index, step in enumerate(steps)]


_Call = tuple[GraphName, Ids, Ids, Ids, Ids]


def _prefill_steps(rows: Sequence[Ids], prefill: int, chunk: int) -> Iterator[_Call]:
    lengths = np.array([min(len(row), prefill) for row in rows])
    for start in range(0, int(lengths.max()), chunk):
        past = np.minimum(start, lengths)
        size = min(chunk, int(lengths.max()) - start)
        valid = np.minimum(lengths - past, size)
        ids = np.zeros((len(rows), size), np.int64)
        for row, tokens in enumerate(rows):
            ids[row, : valid[row]] = tokens[past[row] : past[row] + valid[row]]
        yield "prefill", ids, past, np.maximum(lengths - past, 1), valid


def _decode_steps(rows: Sequence[Ids], prefill: int) -> Iterator[_Call]:
    lengths = np.array([len(row) for row in rows])
    ones = np.ones(len(rows), np.int64)
    for offset in range(int(lengths.max()) - prefill):
        position = np.minimum(lengths, prefill) + offset
        valid = (position < lengths).astype(np.int64)
        past = np.minimum(position, lengths - 1)
        ids = np.array([[tokens[at]] for tokens, at in zip(rows, past, strict=True)])
        yield "decode", ids, past, ones, valid


def compare_sessions(
    reference: Session,
    candidate: Session,
    sequences: Sequence[ArrayLike],
    *,
    prefill: int,
    band: Band,
    chunk: int | None = None,
    layers: bool = False,
    values: bool = True,
) -> ParityReport:
    """The errors of `candidate` against `reference` at every step over rows of tokens.

    Args:
        reference: What is right.
        candidate: What is judged.
        sequences: Token ids of each row; rows may differ in length.
        prefill: How many tokens of each row go through prefill; the others follow one by one.
        band: Which errors are accepted.
        chunk: Most tokens of one prefill call, default all.
        layers: Compare the residual stream too; both sessions must have been opened with `debug_outputs`.
        values: Compare the caches' values, and not their keys alone; one whose values are rotated holds others.

    Raises:
        ValueError: The sessions are of different models, or the rows do not fit them.
    """
    _check_same_model(reference.contract, candidate.contract)
    steps = plan_steps(sequences, prefill, chunk)
    caches = allocate_for(steps, reference), allocate_for(steps, candidate)
    reports = []
    for step in steps:
        logits = step.run(reference, caches[0]), step.run(candidate, caches[1])
        rows = step.is_valid
        tolerance = band.tolerance(largest(logits[0][rows]))
        hidden = zip(reference.hidden_states(), candidate.hidden_states(), strict=True) if layers else ()
        reports.append(
            StepReport(
                step=step.index,
                graph=step.graph,
                position=int(step.past_length.max()),
                tokens=int(rows.sum()),
                # An error of up to the tolerance in both of two logits can turn their order.
                logits=compare_logits(logits[0][rows], logits[1][rows], tie=2 * tolerance),
                logits_tolerance=tolerance,
                cache=_compare_caches(step, (reference.contract, candidate.contract), caches, band, values),
                hidden=tuple(_tensor_error(right[rows], other[rows], band) for right, other in hidden),
            )
        )
    return ParityReport(reference.info, candidate.info, band, tuple(reports))


def allocate_for(steps: Sequence[Step], session: Session) -> Cache:
    """A cache of the session that has room for all of the steps."""
    slots = max(int(step.past_length.max()) + step.input_ids.shape[1] for step in steps)
    return session.allocate_cache(len(steps[0].input_ids), slots)


def _compare_caches(
    step: Step, contracts: tuple[Contract, Contract], caches: tuple[Cache, Cache], band: Band, values: bool
) -> tuple[TensorError, ...]:
    """Error of each layer's keys and values together, over the slots in use; without `values` of the keys."""
    pairs = list(zip(contracts[0].state, contracts[1].state, strict=True))
    # The codes of a quantized cache are no values: its errors show in the logits.
    if any(tensor.dtype not in _FLOAT_CACHES for pair in pairs for tensor in pair):
        return ()
    used = step.past_length + step.valid
    in_use = np.arange(used.max()) < used[:, None]
    errors: list[TensorError] = []
    for tensor, _ in pairs:
        if not values and tensor.role == "value":
            continue
        right, other = (
            cache.read(tensor.name)[:, :, : used.max()].swapaxes(1, 2)[in_use] for cache in caches
        )
        error = _tensor_error(right, other, band)
        if tensor.layer < len(errors):
            error = max(error, errors.pop(), key=lambda one: one.share)
        errors.append(error)
    return tuple(errors)


def _tensor_error(reference: Floats, candidate: Floats, band: Band) -> TensorError:
    with np.errstate(invalid="ignore"):
        return TensorError(largest(reference - candidate), band.tolerance(largest(reference)))


def _check_same_model(reference: Contract, candidate: Contract) -> None:
    for name in ("vocab_size", "num_layers"):
        right, other = getattr(reference, name), getattr(candidate, name)
        if right != other:
            raise ValueError(
                f"the reference has {name} {right}, the candidate {other}; compare one model with itself"
            )
    for tensor, match in zip(reference.state, candidate.state, strict=True):
        # Batch and capacity may be bound in one of the two.
        sizes = [(entry.name, entry.shape[1], entry.shape[3]) for entry in (tensor, match)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the reference's cache has {sizes[0][0]} with K, D = {sizes[0][1:]}, the candidate's {sizes[1][0]} "
                f"with {sizes[1][1:]}; compare one model with itself"
            )
