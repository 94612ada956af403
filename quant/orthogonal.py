"""Orthogonal matrices that spread what stands in one channel over all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Orthogonal = NDArray[np.float64]


def random_hadamard(size: int, seed: int = 0) -> Orthogonal:
    """Q [size, size] = (H x R) diag(s): a Hadamard matrix of the power of two in `size`, and random signs.

    Of what is left when the power of two is divided out, R is a random orthogonal matrix; 1 where nothing is. All
    entries of a size that is a power of two have the same magnitude.
    """
    random = np.random.default_rng(seed)
    rest = size
    hadamard = np.ones((1, 1))
    while rest % 2 == 0:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        rest //= 2
    # The signs of R's diagonal make the distribution uniform; any would do.
    orthogonal, upper = np.linalg.qr(random.normal(size=(rest, rest)))
    orthogonal *= np.sign(np.diagonal(upper))
    if rest == 1:
        orthogonal = np.ones((1, 1))
    signs = random.choice([-1.0, 1.0], size)
    result: Orthogonal = np.kron(hadamard, orthogonal) / np.sqrt(len(hadamard)) * signs[:, None]
    return result
