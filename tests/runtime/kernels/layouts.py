"""Packed weights, written element by element from the description of their layouts, and what they stand for."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

FLOATS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
INTEGERS = ("int8", "int8-block", "int4", "uint4")


def pack_floats(weights: np.ndarray, layout: str) -> np.ndarray:
    """[K, N] in panels of 16 columns."""
    inputs, outputs = weights.shape
    padded = np.zeros((inputs, 16 * math.ceil(outputs / 16)), FLOATS[layout])
    padded[:, :outputs] = weights
    panels = [padded[:, start : start + 16] for start in range(0, padded.shape[1], 16)]
    return np.concatenate([np.ascontiguousarray(panel).view(np.uint8).reshape(-1) for panel in panels])


def pack_integers(
    codes: np.ndarray, scales: np.ndarray, layout: str, zero_points: np.ndarray | None, scale_dtype: type
) -> np.ndarray:
    """Codes [K, N]; scales and zero points [blocks, N], or scales [1, N] for int8."""
    inputs, outputs = codes.shape
    octets = bytearray()
    for panel in range(math.ceil(outputs / 16)):
        columns = [panel * 16 + c for c in range(16)]
        if layout == "int8":
            octets += _row(scales, 0, columns).astype(np.float32).tobytes()
        for block in range(math.ceil(inputs / 32)):
            if layout != "int8":
                octets += _row(scales, block, columns).astype(scale_dtype).tobytes()
            if layout == "uint4":
                assert zero_points is not None
                octets += _row(zero_points, block, columns).astype(np.uint8).tobytes()
            octets += _codes(codes, block, columns, layout)
    return np.frombuffer(bytes(octets), np.uint8)


def _row(values: np.ndarray, block: int, columns: list[int]) -> np.ndarray:
    return np.array([values[block, c] if c < values.shape[1] else 0 for c in columns])


def _codes(codes: np.ndarray, block: int, columns: list[int], layout: str) -> bytes:
    excess = 8 if layout == "int4" else 0

    def code(k: int, column: int) -> int:
        inside = k < codes.shape[0] and column < codes.shape[1]
        return (int(codes[k, column]) if inside else 0) + excess

    result = bytearray()
    first = block * 32
    four_bits = layout in ("int4", "uint4")
    for group in range(4 if four_bits else 8):
        for column in columns:
            for j in range(4):
                if four_bits:
                    low = code(first + 8 * group + j, column)
                    result.append(low | code(first + 8 * group + 4 + j, column) << 4)
                else:
                    result.append(code(first + 4 * group + j, column) % 256)
    return bytes(result)


def random_weights(
    rng: np.random.Generator, inputs: int, outputs: int, layout: str, scale_format: str
) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes, and the matrix [K, N] float64 that they stand for."""
    if layout in FLOATS:
        weights = rng.standard_normal((inputs, outputs)).astype(FLOATS[layout])
        return pack_floats(weights, layout), weights.astype(np.float64)
    blocks = 1 if layout == "int8" else math.ceil(inputs / 32)
    scale_dtype = np.float16 if scale_format == "float16" else np.float32
    scales = rng.uniform(0.001, 0.01, (blocks, outputs)).astype(scale_dtype)
    low, high = {"int4": (-8, 8), "uint4": (0, 16)}.get(layout, (-128, 128))
    codes = rng.integers(low, high, (inputs, outputs))
    zero_points = rng.integers(0, 16, (blocks, outputs)) if layout == "uint4" else None
    block = np.arange(inputs) // 32 if blocks > 1 or layout != "int8" else np.zeros(inputs, int)
    offset = 0 if zero_points is None else zero_points[block]
    weights = (codes - offset) * scales[block].astype(np.float64)
    return pack_integers(codes, scales, layout, zero_points, scale_dtype), weights


def alternate(gate: np.ndarray, up: np.ndarray, outputs: int) -> np.ndarray:
    """Packed panels of a gate and of what it gates, `outputs` columns each, in turn."""
    panels = math.ceil(outputs / 16)
    return np.stack([gate.reshape(panels, -1), up.reshape(panels, -1)], axis=1).reshape(-1)
