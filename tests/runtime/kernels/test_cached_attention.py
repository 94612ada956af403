from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

# Sums of a hundred float32 products, softmax over a few hundred slots.
TOLERANCE = 1e-5
# (query heads, heads of the cache, head size): one shared head, sizes that are no multiple of the registers.
HEADS = [(4, 2, 8), (3, 1, 20), (9, 3, 64), (20, 1, 16), (4, 4, 128), (6, 2, 100)]

Attend = Callable[..., list[np.ndarray]]


def inputs(heads: tuple[int, int, int], tokens: int, rotary: int = 0, norm: bool = False) -> dict[str, Any]:
    """Three rows: an empty cache, one with a few slots, one that the new tokens fill to the end."""
    rng = np.random.default_rng(sum(heads) + tokens)
    query_heads, kv_heads, size = heads
    capacity = tokens + 300

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    angles = rng.uniform(0, 6, (3, tokens, rotary // 2))
    return {
        "qkv": normal(3, tokens, (query_heads + 2 * kv_heads) * size),
        "past_length": np.array([0, 5, capacity - tokens]),
        "past_key": normal(3, kv_heads, capacity, size),
        "past_value": normal(3, kv_heads, capacity, size),
        "cos": np.cos(angles).astype(np.float32) if rotary else None,
        "sin": np.sin(angles).astype(np.float32) if rotary else None,
        "q_norm": rng.uniform(0.5, 2, size).astype(np.float32) if norm else None,
        "k_norm": rng.uniform(0.5, 2, size).astype(np.float32) if norm else None,
    }


@pytest.fixture
def attend(run: Callable[..., list[np.ndarray]]) -> Attend:
    """`attend(given, heads, **options)`: one CachedAttention."""

    def compute(given: dict[str, Any], heads: tuple[int, int, int], **options: Any) -> list[np.ndarray]:
        attributes = {"scale": heads[2] ** -0.5, "window": 0, "softcap": 0.0, "interleaved": 0, **options}
        rotary = 0 if given["cos"] is None else 2 * given["cos"].shape[-1]
        return run(
            "CachedAttention", given, 3,
            num_heads=heads[0], kv_num_heads=heads[1], head_dim=heads[2], rotary_dim=rotary, norm_epsilon=1e-6,
            **attributes,
        )  # fmt: skip

    return compute


def rotated(x: np.ndarray, given: dict[str, Any], interleaved: int) -> np.ndarray:
    if given["cos"] is None:
        return x
    cos, sin = (given[name].astype(np.float64)[:, :, None] for name in ("cos", "sin"))
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (slice(half), slice(half, 2 * half))
    )
    result = x.copy()
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def expected(
    given: dict[str, Any],
    heads: tuple[int, int, int],
    window: int = 0,
    softcap: float = 0.0,
    interleaved: int = 0,
) -> list[np.ndarray]:
    """The operator's description, a position at a time in float64."""
    query_heads, kv_heads, size = heads
    qkv = given["qkv"].astype(np.float64)
    batch, tokens, _ = qkv.shape
    q, k, v = np.split(qkv.reshape(batch, tokens, -1, size), [query_heads, query_heads + kv_heads], axis=2)
    if given["q_norm"] is not None:
        q, k = (
            x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * given[name]
            for x, name in ((q, "q_norm"), (k, "k_norm"))
        )
    q, k = rotated(q, given, interleaved), rotated(k, given, interleaved)
    keys, values = given["past_key"].astype(np.float64), given["past_value"].astype(np.float64)
    result = np.zeros((batch, tokens, query_heads, size))
    for row, past in enumerate(given["past_length"]):
        keys[row, :, past : past + tokens] = k[row].swapaxes(0, 1)
        values[row, :, past : past + tokens] = v[row].swapaxes(0, 1)
        for token in range(tokens):
            last = past + token
            seen = slice(max(0, last - window + 1) if window else 0, last + 1)
            for head in range(query_heads):
                kv_head = head // (query_heads // kv_heads)
                scores = keys[row, kv_head, seen] @ q[row, token, head] * size**-0.5
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                result[row, token, head] = weights / weights.sum() @ values[row, kv_head, seen]
    return [result.reshape(batch, tokens, -1), keys, values]


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("heads", HEADS)
def test_equals_the_formula(
    instruction_set: str, attend: Attend, heads: tuple[int, int, int], tokens: int
) -> None:
    given = inputs(heads, tokens)
    for found, right in zip(attend(given, heads), expected(given, heads), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{"window": 5}, {"window": 100}, {"softcap": 5.0}, {"interleaved": 1}],
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("tokens", [1, 70])
def test_options(instruction_set: str, attend: Attend, tokens: int, options: dict[str, Any]) -> None:
    heads = (6, 2, 24)
    given = inputs(heads, tokens, rotary=12, norm=True)
    for found, right in zip(attend(given, heads, **options), expected(given, heads, **options), strict=True):
        np.testing.assert_allclose(found, right, rtol=0, atol=TOLERANCE)


def test_far_scores(instruction_set: str, attend: Attend) -> None:
    """One slot takes all the weight, and scores are beyond what an exponential holds."""
    heads = (4, 2, 16)
    given = inputs(heads, 40)
    given["qkv"] *= 50
    for found, right in zip(attend(given, heads), expected(given, heads), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-3)


def test_row_does_not_depend_on_its_neighbours(instruction_set: str, attend: Attend) -> None:
    heads = (9, 3, 64)
    given = inputs(heads, 1)
    whole = attend(given, heads)[0]
    for row in range(3):
        alone = {name: None if array is None else array[row : row + 1] for name, array in given.items()}
        np.testing.assert_allclose(attend(alone, heads)[0][0], whole[row], rtol=0, atol=1e-6)


@pytest.mark.parametrize("past", [-1, 301])
def test_positions_outside_of_the_cache_are_refused(attend: Attend, past: int) -> None:
    heads = (4, 2, 8)
    given = inputs(heads, 2)
    given["past_length"] = np.array([0, past, 0])
    with pytest.raises(
        InvalidArgument, match=f"past_length {past} and 2 tokens pass the end of a cache of 302"
    ):
        attend(given, heads)
