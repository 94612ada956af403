"""Panels: 16 columns of a matrix, laid out in the order in which the kernels read them.

All functions take columns of a whole number of panels' worth or fewer, fill the last panel up with columns of zeros,
and give one row for each panel. K inputs, n columns, P panels, C blocks of `BLOCK` inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL = 16
BLOCK = 32


def panel_count(columns: int) -> int:
    """Panels that hold so many columns."""
    return -(-columns // PANEL)


def block_count(in_features: int) -> int:
    """Blocks that hold so many inputs."""
    return -(-in_features // BLOCK)


def float_panels(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Elements [K, n] as [P, K * 16 * bytes of an element]."""
    padded = _padded(values, len(values), 0)
    panels = padded.reshape(len(values), -1, PANEL).transpose(1, 0, 2)
    return _octets(panels)


def int8_panels(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Codes [K, n] as [P, C, 512]: by groups of 4 inputs, then columns, then the inputs of the group."""
    blocks = block_count(len(codes))
    padded = _padded(codes.view(np.uint8), blocks * BLOCK, 0)
    return _by_fours(padded.reshape(blocks, BLOCK // 4, 4, -1))


def int4_panels(codes: NDArray[np.uint8], zero: int) -> NDArray[np.uint8]:
    """Codes [K, n] of 0 to 15 as [P, C, 256]: by groups of 8 inputs, the first 4 of them in the low halves of bytes.

    Args:
        codes: One a byte.
        zero: The code that fills a short last block and panel.
    """
    blocks = block_count(len(codes))
    padded = _padded(codes, blocks * BLOCK, zero)
    groups = padded.reshape(blocks, BLOCK // 8, 2, 4, -1)
    return _by_fours(groups[:, :, 0] | groups[:, :, 1] << np.uint8(4))


def _by_fours(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes [C, groups, 4, n] as [P, C, groups * 16 * 4]."""
    blocks, groups, _, columns = octets.shape
    # Four bytes make a word: moving words takes a fraction of the time that moving bytes takes.
    words = np.empty((blocks, groups, columns, 4), np.uint8)
    for index in range(4):
        words[..., index] = octets[:, :, index]
    panels = words.view(np.uint32).reshape(blocks, groups, -1, PANEL).transpose(2, 0, 1, 3)
    return _octets(panels).reshape(-1, blocks, groups * PANEL * 4)


def by_block(values: NDArray[Any], in_features: int, block_size: int | None) -> NDArray[np.uint8]:
    """What the columns of a block share, [blocks, n], as [P, C, 16 * bytes of an element].

    Args:
        values: One row for each `block_size` inputs, or one row for all.
        in_features: K.
        block_size: A multiple of `BLOCK`; None: one row for all.
    """
    blocks = block_count(in_features)
    wider = np.zeros(blocks, np.intp) if block_size is None else np.arange(blocks) * BLOCK // block_size
    padded = _padded(values, len(values), 0)[wider]
    panels = padded.reshape(blocks, -1, PANEL).transpose(1, 0, 2)
    return _octets(panels).reshape(panels.shape[0], blocks, -1)


def _padded(values: NDArray[Any], rows: int, fill: int) -> NDArray[Any]:
    height, width = values.shape
    missing = -width % PANEL
    if height == rows and not missing:
        return values
    return np.pad(values, ((0, rows - height), (0, missing)), constant_values=fill)


def _octets(panels: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of each panel."""
    return np.ascontiguousarray(panels).reshape(len(panels), -1).view(np.uint8)
