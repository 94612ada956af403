"""How far a candidate's numbers are from a reference's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.runtime.session import Floats

# Rows are widened to float64 in blocks of at most so many values, 32 MB an array.
_BLOCK_VALUES = 1 << 22
# Stands for the reference's own choice, which an exact tie is not.
_SAME = -1.0


@dataclass(frozen=True, slots=True)
class LogitErrors:
    """Errors over R rows of logits.

    Attributes:
        max_abs: Largest absolute difference.
        mean_abs: Mean absolute difference.
        cosine: Least cosine of a row with its reference.
        kl: Largest KL(reference || candidate) of a row's distribution, in nats.
        kl_mean: Mean of the same.
        agree: Rows whose most likely token is the reference's.
        ambiguous: Rows with another one, which the reference puts below its own by no more than the tie tolerance.
        differ: Rows with another one otherwise.
    """

    max_abs: float
    mean_abs: float
    cosine: float
    kl: float
    kl_mean: float
    agree: int
    ambiguous: int
    differ: int


def compare_logits(reference: Floats, candidate: Floats, tie: float) -> LogitErrors:
    """Errors of `candidate` against `reference`, both [R, V]; NaN where a value is not finite.

    Args:
        reference: What is right.
        candidate: What is judged.
        tie: Two logits of the reference closer than this are a near-tie: rounding may decide between them.
    """
    rows = max(1, _BLOCK_VALUES // reference.shape[1])
    blocks = [
        _row_errors(reference[start : start + rows].astype(np.float64), candidate[start : start + rows])
        for start in range(0, len(reference), rows)
    ]
    max_abs, mean_abs, cosine, kl, deficit = (np.concatenate(column) for column in zip(*blocks, strict=True))
    same = deficit == _SAME
    agree = int(same.sum())
    # A comparison with NaN is false, so that a row without an answer counts as different.
    ambiguous = int((~same & (deficit <= tie)).sum())
    return LogitErrors(
        max_abs=float(max_abs.max()),
        mean_abs=float(mean_abs.mean()),
        cosine=float(cosine.min()),
        kl=float(kl.max()),
        kl_mean=float(kl.mean()),
        agree=agree,
        ambiguous=ambiguous,
        differ=len(deficit) - agree - ambiguous,
    )


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithm of each row's distribution, [..., V]."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def _row_errors(reference: NDArray[np.float64], candidate: Floats) -> tuple[NDArray[Any], ...]:
    """Of each row: max and mean absolute error, cosine, KL, and how far the reference puts the choice below its own."""
    other = candidate.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(reference - other)
        norms = np.linalg.norm(reference, axis=1) * np.linalg.norm(other, axis=1)
        cosine = np.divide((reference * other).sum(axis=1), norms, out=np.ones(len(norms)), where=norms != 0)
        log_p, log_q = log_softmax(reference), log_softmax(other)
        # Rounding can leave a KL of nothing slightly below zero.
        kl = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(axis=1), 0)
        choice, rows = other.argmax(axis=1), np.arange(len(reference))
        deficit = reference.max(axis=1) - reference[rows, choice]
    deficit[choice == reference.argmax(axis=1)] = _SAME
    deficit[~np.isfinite(other).all(axis=1)] = np.nan
    return error.max(axis=1), error.mean(axis=1), cosine, kl, deficit


@dataclass(frozen=True, slots=True)
class TensorError:
    """Largest absolute error of a tensor, and the largest that is in band."""

    max_abs: float
    tolerance: float

    @property
    def in_band(self) -> bool:
        """Whether the error is a number and within the tolerance."""
        return self.max_abs <= self.tolerance

    @property
    def share(self) -> float:
        """The error as a share of the tolerance, infinite where it is no number."""
        return math.inf if math.isnan(self.max_abs) else self.max_abs / self.tolerance


def largest(values: NDArray[Any]) -> float:
    """Largest absolute value, 0 of an empty array, NaN if there is one."""
    return float(np.abs(values).max(initial=0))
