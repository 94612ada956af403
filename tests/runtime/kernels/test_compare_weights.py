"""Quantized weights compared with their source in C++: what a NumPy formula gives, on every instruction set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgraph.quant.bundle_weights import as_float32
from kvgraph.runtime.kernels import weights as compiled

pytestmark = [
    pytest.mark.skipif(
        not compiled.compiled(), reason="kvgraph's CPU kernels are not compiled in this installation"
    ),
    pytest.mark.usefixtures("instruction_set"),
]

TYPES = tuple(np.dtype(kind) for kind in (np.float32, np.float16, ml_dtypes.bfloat16))
# Sums of squares in float64, in another order.
ORDER = 1e-12


@pytest.mark.parametrize("compute", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("blocks", [(64, 1), (32, 1), (1, 16), (1, 86)], ids=str)
@pytest.mark.parametrize(("bits", "zeros"), [(4, True), (4, False), (8, True), (8, False)])
def test_measures_what_the_formula_gives(
    bits: int, zeros: bool, blocks: tuple[int, int], kind: np.dtype[np.generic], compute: np.dtype[np.generic]
) -> None:
    rows, columns = 64, 86
    random, half = np.random.default_rng(bits), 1 << (bits - 1)
    codes = random.integers(-half, half, (rows, columns), np.int8)
    octets = codes.view(np.uint8).reshape(-1)
    if bits == 4:
        octets = (octets[::2] & 15) | octets[1::2] << 4
    shape = rows // blocks[0], -(-columns // blocks[1])
    scales = random.uniform(0.01, 0.02, shape).astype(np.float32)
    points = random.integers(-half, half, shape).astype(np.float32) if zeros else None
    exact = (random.standard_normal((rows, columns)) * 0.3).astype(kind)

    found = compiled.compare(exact, octets, bits, compute.name, scales, points, blocks)

    def spread(values: np.ndarray) -> np.ndarray:
        return values.repeat(blocks[0], axis=0).repeat(blocks[1], axis=1)[:, :columns]

    shifted = codes.astype(np.float32) - (0 if points is None else spread(points))
    rounded = (shifted * spread(scales)).astype(compute).astype(np.float32)
    error = (rounded - as_float32(exact)).astype(np.float64)
    signal, noise = np.square(exact.astype(np.float64)).sum(), np.square(error).sum()
    np.testing.assert_allclose(found[:2], (signal, noise), rtol=ORDER)
    assert found[2] == np.abs(error).max()


def test_values_far_beyond_the_squares_of_float32_are_summed() -> None:
    exact = np.full((1, 16), 1e30, np.float32)

    found = compiled.compare(
        exact, np.zeros(16, np.uint8), 8, "float32", np.ones((1, 1), np.float32), None, (1, 16)
    )

    np.testing.assert_allclose(found[0], 16e60, rtol=1e-6)
    assert found[1] == found[0]
