"""Panels of integer codes laid out in C++: the bytes that NumPy lays out, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraph.export.packed.panels import int4_panels, int8_panels
from kvgraph.runtime.kernels import weights as compiled

pytestmark = [
    pytest.mark.skipif(
        not compiled.compiled(), reason="kvgraph's CPU kernels are not compiled in this installation"
    ),
    pytest.mark.usefixtures("instruction_set"),
]

# Outputs of the matrix, first and last of those that are laid out.
RANGES = [(64, 0, 64), (64, 16, 48), (75, 0, 75), (75, 32, 75), (75, 2, 61), (9, 0, 9)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inputs", [32, 96, 44, 7])
@pytest.mark.parametrize(("outputs", "start", "stop"), RANGES)
@pytest.mark.parametrize(("flip", "fill"), [(8, 8), (8, 0), (0, 0)])
def test_half_bytes_as_numpy_lays_them_out(
    flip: int, fill: int, outputs: int, start: int, stop: int, inputs: int, transposed: bool
) -> None:
    codes = np.random.default_rng(inputs).integers(0, 16, (inputs, outputs), np.uint8)
    stored = (codes ^ np.uint8(flip)).T if transposed else codes ^ np.uint8(flip)
    padded = np.pad(stored, ((0, 0), (0, stored.shape[1] % 2)))
    octets = np.ascontiguousarray(padded[:, ::2] | padded[:, 1::2] << np.uint8(4))

    found = pack(compiled.Codes(octets, True, transposed, flip, fill), inputs, start, stop, 256)

    np.testing.assert_array_equal(found, int4_panels(codes[:, start:stop], fill))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inputs", [32, 96, 44, 7])
@pytest.mark.parametrize(("outputs", "start", "stop"), RANGES)
def test_bytes_as_numpy_lays_them_out(
    outputs: int, start: int, stop: int, inputs: int, transposed: bool
) -> None:
    codes = np.random.default_rng(inputs).integers(-127, 128, (inputs, outputs), np.int8)
    stored = np.ascontiguousarray(codes.T) if transposed else codes

    found = pack(compiled.Codes(stored, False, transposed, 0, 0), inputs, start, stop, 512)

    np.testing.assert_array_equal(found, int8_panels(codes[:, start:stop]))


def pack(codes: compiled.Codes, inputs: int, start: int, stop: int, size: int) -> np.ndarray:
    """Codes of blocks that lie 5 bytes apart, behind 3 others: [P, C, size]; nothing else is written."""
    shape = -(-(stop - start) // 16), -(-inputs // 32), size + 5
    panels = np.full((shape[0], 3 + shape[1] * shape[2]), 77, np.uint8)

    compiled.pack_panels(codes, inputs, start, stop, panels[:, 3:], size + 5)

    blocks = panels[:, 3:].reshape(shape)
    assert (panels[:, :3] == 77).all()
    assert (blocks[:, :, size:] == 77).all()
    return blocks[:, :, :size]
