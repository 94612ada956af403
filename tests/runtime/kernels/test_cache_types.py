"""CachedAttention over caches of float16, INT8 and E4M3, bound to both ends as the runtime binds them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from kvgraph.runtime import kernels

# Sums of some hundred float32 products, softmax over a few hundred slots.
TOLERANCE = 2e-5
# Element type -> how ONNX and NumPy spell it, and the largest code.
TYPES: dict[str, tuple[int, Any, float]] = {
    "float32": (TensorProto.FLOAT, np.float32, np.inf),
    "float16": (TensorProto.FLOAT16, np.float16, np.inf),
    "int8": (TensorProto.INT8, np.int8, 127.0),
    "float8": (TensorProto.FLOAT8E4M3FN, ml_dtypes.float8_e4m3fn, 448.0),
}
CODES = ("int8", "float8")
# (query heads, heads of the cache, head size, half of what turns).
HEADS = [(4, 2, 8, 4), (3, 1, 20, 6), (8, 2, 64, 32), (20, 1, 16, 0), (6, 2, 100, 36)]

Arrays = dict[str, NDArray[Any]]


def given(
    heads: tuple[int, int, int, int], tokens: int, kind: str, unrotated: bool = False, norm: bool = False
) -> Arrays:
    """An empty row, one with a few slots, one that is filled to the end; some new entries are out of range."""
    rng = np.random.default_rng(sum(heads) + tokens)
    query_heads, kv_heads, size, half = heads
    capacity = tokens + 300
    _, element, largest = TYPES[kind]
    arrays: Arrays = {
        "qkv": rng.standard_normal((3, tokens, (query_heads + 2 * kv_heads) * size), np.float32),
        "past_length": np.array([0, 5, capacity - tokens]),
    }
    shape = (3, kv_heads, capacity, size)
    for name in ("past_key", "past_value"):
        if kind == "float8":
            arrays[name] = rng.integers(0, 127, shape, np.uint8) + 128 * rng.integers(0, 2, shape, np.uint8)
            arrays[name] = arrays[name].view(element)
        else:
            arrays[name] = (
                (rng.standard_normal(shape) * (40 if kind == "int8" else 1)).clip(-128, 127).astype(element)
            )
    if half:
        angles = rng.uniform(0, 6, (capacity, half))
        rows = arrays["past_length"][:, None] + np.arange(tokens)
        arrays |= {"cos": np.cos(angles)[rows], "sin": np.sin(angles)[rows]}
        if unrotated:
            arrays |= {"key_cos": np.cos(angles)[None], "key_sin": np.sin(angles)[None]}
    if norm:
        arrays |= {name: rng.uniform(0.5, 2, size) for name in ("q_norm", "k_norm")}
    if kind in CODES:
        for name in ("key", "value"):
            arrays[f"{name}_scale"] = rng.uniform(1.5, 4, (kv_heads, size)) / largest
            arrays[f"{name}_offset"] = rng.uniform(-1, 1, (kv_heads, size))
    return {name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in arrays.items()}


INPUTS = (
    "qkv", "past_length", "past_key", "past_value", "cos", "sin", "q_norm", "k_norm", "key_cos", "key_sin",
    "key_scale", "key_offset", "value_scale", "value_offset",
)  # fmt: skip


def attend(arrays: Arrays, heads: tuple[int, int, int, int], kind: str, **options: Any) -> list[NDArray[Any]]:
    """The result, and both caches after it, as they are stored."""
    query_heads, kv_heads, size, half = heads
    attributes = {"scale": size**-0.5, "window": 0, "softcap": 0.0, "interleaved": 0, **options}
    outputs = ["out", "present_key", "present_value"]
    node = helper.make_node(
        "CachedAttention", [name if name in arrays else "" for name in INPUTS], outputs, domain="kvgraph",
        num_heads=query_heads, kv_num_heads=kv_heads, head_dim=size, rotary_dim=2 * half, norm_epsilon=1e-6,
        **attributes,
    )  # fmt: skip
    held = {name: array.copy() for name, array in arrays.items()}
    types = {name: TensorProto.INT64 if name == "past_length" else TensorProto.FLOAT for name in held}
    types |= dict.fromkeys(("past_key", "past_value", *outputs[1:]), TYPES[kind][0])
    infos = [helper.make_tensor_value_info(name, types[name], held[name].shape) for name in held]
    held["out"] = np.zeros((*arrays["qkv"].shape[:2], query_heads * size), np.float32)
    held |= {"present_key": held["past_key"], "present_value": held["past_value"]}
    types["out"] = TensorProto.FLOAT
    graph = helper.make_graph(
        [node],
        "one",
        infos,
        [helper.make_tensor_value_info(name, types[name], held[name].shape) for name in outputs],
    )
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("kvgraph", 1)]
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 4
    session_options.intra_op_num_threads = 2
    session_options.add_session_config_entry("session.set_denormal_as_zero", "1")
    session_options.register_custom_ops_library(str(kernels.library_path()))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options)
    binding = session.io_binding()
    for name, array in held.items():
        bind = binding.bind_output if name in outputs else binding.bind_input
        bind(name, "cpu", 0, types[name], array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    return [held[name] for name in outputs]


def turned(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], interleaved: int) -> NDArray[Any]:
    """x [..., D] by angles that broadcast to [..., R / 2]."""
    half, result = cos.shape[-1], x.copy()
    first = slice(0, 2 * half, 2) if interleaved else slice(half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def new_entries(
    arrays: Arrays, heads: tuple[int, int, int, int], interleaved: int
) -> list[NDArray[np.float64]]:
    """Queries, and keys and values as they are kept, [B, S, heads, D], in float64."""
    query_heads, kv_heads, size, half = heads
    qkv = arrays["qkv"].astype(np.float64)
    parts = qkv.reshape(*qkv.shape[:2], -1, size)
    q, k, v = np.split(parts, [query_heads, query_heads + kv_heads], axis=2)
    if "q_norm" in arrays:
        q, k = (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * arrays[name].astype(np.float64)
            for x, name in ((q, "q_norm"), (k, "k_norm"))
        )
    if half:
        angles = (arrays["cos"][:, :, None], arrays["sin"][:, :, None])
        q = turned(q, *angles, interleaved)
        k = k if "key_cos" in arrays else turned(k, *angles, interleaved)
    return [q, k, v]


def stored(entries: NDArray[Any], arrays: Arrays, name: str, kind: str) -> NDArray[Any]:
    """Entries [B, S, K, D] as the cache holds them, as QuantizeLinear rounds: halves to even, and saturating."""
    _, element, largest = TYPES[kind]
    if kind not in CODES:
        return entries.astype(element)
    scaled = (entries.astype(np.float32) - arrays[f"{name}_offset"]) / arrays[f"{name}_scale"]
    return (np.rint(scaled).clip(-128, 127) if kind == "int8" else scaled.clip(-largest, largest)).astype(
        element
    )


def attended(
    arrays: Arrays, heads: tuple[int, int, int, int], queries: NDArray[Any], caches: list[NDArray[Any]],
    window: int = 0, softcap: float = 0.0, interleaved: int = 0,
) -> NDArray[np.float64]:  # fmt: skip
    """What queries get of caches as they are stored, a position at a time in float64."""
    keys, values = (
        cache.astype(np.float64) * arrays.get(f"{name}_scale", np.ones(1))[..., None, :]
        + arrays.get(f"{name}_offset", np.zeros(1))[..., None, :]
        for cache, name in zip(caches, ("key", "value"), strict=True)
    )
    if "key_cos" in arrays:
        keys = turned(keys, arrays["key_cos"][0], arrays["key_sin"][0], interleaved)
    result = np.zeros(queries.shape)
    for row, past in enumerate(arrays["past_length"]):
        for token in range(queries.shape[1]):
            last = past + token
            seen = slice(max(0, last - window + 1) if window else 0, last + 1)
            for head in range(heads[0]):
                kv_head = head * heads[1] // heads[0]
                scores = keys[row, kv_head, seen] @ queries[row, token, head] * heads[2] ** -0.5
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                result[row, token, head] = weights / weights.sum() @ values[row, kv_head, seen]
    return result.reshape(*queries.shape[:2], -1)


def check(arrays: Arrays, heads: tuple[int, int, int, int], kind: str, **options: Any) -> None:
    out, *caches = attend(arrays, heads, kind, **options)
    queries, *entries = new_entries(arrays, heads, options.get("interleaved", 0))
    tokens = queries.shape[1]
    for cache, name, new in zip(caches, ("key", "value"), entries, strict=True):
        right = stored(new, arrays, name, kind)
        before = arrays[f"past_{name}"]
        for row, past in enumerate(arrays["past_length"]):
            found = cache[row, :, past : past + tokens].swapaxes(0, 1).astype(np.float32)
            expected = right[row].astype(np.float32)
            # Norms and angles are float32: where a value lies between two codes, it may fall to either.
            if "q_norm" in arrays or "cos" in arrays:
                assert kind not in CODES or float((found != expected).mean()) < 0.01
                np.testing.assert_allclose(found, expected, rtol=0.13, atol=1 if kind == "int8" else 1e-3)
            else:
                np.testing.assert_array_equal(found, expected)
            # Nothing else is written.
            np.testing.assert_array_equal(
                cache[row, :, :past].view(np.uint8), before[row, :, :past].view(np.uint8)
            )
    expected_out = attended(arrays, heads, queries, caches, **options)
    np.testing.assert_allclose(
        out, expected_out, rtol=0, atol=TOLERANCE * max(1.0, float(np.abs(expected_out).max()))
    )


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_equals_the_formula(
    instruction_set: str, heads: tuple[int, int, int, int], kind: str, tokens: int
) -> None:
    check(given(heads, tokens, kind), heads, kind)


OPTIONS: list[dict[str, Any]] = [{}, {"window": 5}, {"window": 100}, {"softcap": 5.0}, {"interleaved": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("unrotated", [False, True])
# Of the latter the halves that turn are whole registers.
@pytest.mark.parametrize("heads", [(6, 2, 40, 17), (4, 2, 64, 16)])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("kind", CODES)
def test_options(
    instruction_set: str,
    kind: str,
    tokens: int,
    heads: tuple[int, int, int, int],
    unrotated: bool,
    options: dict[str, Any],
) -> None:
    check(given(heads, tokens, kind, unrotated, norm=True), heads, kind, **options)


@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_rounded_as_numpy_rounds_them(instruction_set: str, kind: str) -> None:
    """Halves to even, the smallest numbers, and what is out of range."""
    heads = (1, 1, 2048, 0)
    arrays = given(heads, 1, kind)
    halves = np.arange(-1024, 1024, dtype=np.float32)
    if kind == "int8":
        values = np.stack([halves / 2, halves * 1e3, np.linspace(-129, 129, 2048)])
    elif kind == "float8":
        codes = np.sort(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
        codes = codes[np.isfinite(codes)]
        middles = (codes[1:] + codes[:-1]) / 2
        values = np.stack([np.resize(middles, 2048), np.resize(codes, 2048), halves / 2])
    else:
        values = np.stack([halves * 2.0**-25, halves * 1.000123, halves * 2.0**-12])
    arrays["qkv"][:, 0, 4096:] = values
    for name in ("key", "value"):
        if kind in CODES:
            arrays[f"{name}_scale"][...], arrays[f"{name}_offset"][...] = 1, 0
    cache = attend(arrays, heads, kind)[2]
    right = stored(values.astype(np.float32)[:, None, None], arrays, "value", kind)
    for row, past in enumerate(arrays["past_length"]):
        np.testing.assert_array_equal(
            cache[row, 0, past].astype(np.float32), right[row, 0, 0].astype(np.float32)
        )


def test_codes_without_scales_are_refused() -> None:
    if kernels.library_path() is None:
        pytest.skip("the operators were not compiled: there was no C++ compiler")
    heads = HEADS[0]
    arrays = given(heads, 1, "int8")
    del arrays["value_offset"]
    with pytest.raises(Exception, match="scales and offsets belong to a cache of 8 bits, all four of them"):
        attend(arrays, heads, "int8")
