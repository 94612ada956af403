"""What the operators of kvgraph's CPU kernels compute, in NumPy and from their description alone, and a session of it.

The unpacking here is the inverse of no code of ours: it takes the bytes apart one panel after another, as the layouts
are written down.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from kvgraph.export.contract import Contract, GraphName
from kvgraph.runtime.session import Floats, Ids

FLOATS: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def unpack(data: NDArray[np.uint8], inputs: int, outputs: int, layout: str, scale_format: str) -> Floats:
    """The matrix [K, N] that packed bytes stand for, float32."""
    panels = data.reshape(math.ceil(outputs / 16), -1)
    columns = np.concatenate([_panel(panel, inputs, layout, scale_format) for panel in panels], axis=1)
    return columns[:inputs, :outputs]


def _panel(panel: NDArray[np.uint8], inputs: int, layout: str, scale_format: str) -> Floats:
    """16 columns."""
    if layout in FLOATS:
        return panel.view(FLOATS[layout]).reshape(inputs, 16).astype(np.float32)
    blocks = math.ceil(inputs / 32)
    if layout == "int8":
        scales = panel[:64].view(np.float32)
        codes = [_int8_block(panel[64 + 512 * b : 64 + 512 * (b + 1)]) for b in range(blocks)]
        return np.concatenate(codes).astype(np.float32) * scales
    scale = np.dtype(np.float16 if scale_format == "float16" else np.float32)
    parts = []
    for block in panel.reshape(blocks, -1):
        scales, rest = (
            block[: 16 * scale.itemsize].view(scale).astype(np.float32),
            block[16 * scale.itemsize :],
        )
        if layout == "int8-block":
            values = _int8_block(rest).astype(np.float32)
        elif layout == "int4":
            values = _int4_block(rest).astype(np.float32) - 8
        else:
            values = _int4_block(rest[16:]).astype(np.float32) - rest[:16].astype(np.float32)
        parts.append(values * scales)
    return np.concatenate(parts)


def _int8_block(octets: NDArray[np.uint8]) -> NDArray[np.int8]:
    codes = np.empty((32, 16), np.int8)
    for group in range(8):
        for column in range(16):
            for j in range(4):
                codes[4 * group + j, column] = octets.view(np.int8)[64 * group + 4 * column + j]
    return codes


def _int4_block(octets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    codes = np.empty((32, 16), np.uint8)
    for group in range(4):
        for column in range(16):
            for j in range(4):
                octet = octets[64 * group + 4 * column + j]
                codes[8 * group + j, column] = octet & 15
                codes[8 * group + 4 + j, column] = octet >> 4
    return codes


def _erf(x: Floats) -> Floats:
    return np.vectorize(math.erf)(x.astype(np.float64)).astype(np.float32)


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + _erf(x / np.float32(math.sqrt(2)))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def rounded(x: Floats, form: str, input_scale: float) -> Floats:
    """The input of a product after it is rounded."""
    if form == "float":
        return x
    if form == "static":
        scale = np.float32(input_scale)
        return np.clip(np.rint(x / scale), -128, 127).astype(np.float32) * scale
    width = x.shape[-1]
    size = 32 if form == "block" else width
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % size)])
    blocks = padded.reshape(*x.shape[:-1], -1, size)
    scale = np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)
    scale = np.where(scale == 0, np.float32(1), scale)
    return (np.rint(blocks / scale) * scale).reshape(padded.shape)[..., :width]


def _separated(weight: Floats, features: int) -> Floats:
    """Columns of the gate, then of what it gates, of panels that take turns."""
    panels = weight.reshape(len(weight), -1, 2, 16)
    return np.concatenate(
        [panels[:, :, part].reshape(len(weight), -1)[:, :features] for part in range(2)], axis=1
    )


class PackedLinear(OpRun):
    op_domain = "kvgraph"

    def _run(self, x, weight, bias=None, residual=None, **attributes):
        gate, count = attributes["gate"], attributes["out_features"]
        columns = 32 * math.ceil(count // 2 / 16) if gate else count
        matrix = _unpacked(weight, columns, attributes)
        if gate:
            matrix = _separated(matrix, count // 2)
        result = rounded(x, attributes["rounding"], attributes.get("input_scale", 0.0)) @ matrix
        if bias is not None:
            result = result + bias
        if gate:
            result = ACTIVATIONS[gate](result[..., : count // 2]) * result[..., count // 2 :]
        result = ACTIVATIONS[attributes["activation"]](result)
        return ((result if residual is None else result + residual).astype(np.float32),)


class PackedGather(OpRun):
    op_domain = "kvgraph"

    def _run(self, weight, ids, **attributes):
        return (_unpacked(weight, attributes["out_features"], attributes).T[ids],)


def _unpacked(weight: NDArray[np.uint8], columns: int, attributes: Mapping[str, Any]) -> Floats:
    return _remembered(
        weight.tobytes(), attributes["in_features"], columns, attributes["format"], attributes["scale_format"]
    )


@functools.cache
def _remembered(data: bytes, inputs: int, columns: int, layout: str, scale_format: str) -> Floats:
    return unpack(np.frombuffer(data, np.uint8), inputs, columns, layout, scale_format)


class PackedExperts(OpRun):
    op_domain = "kvgraph"

    def _run(self, x, chosen, shares, gate_up, down, residual=None, **attributes):
        count, hidden, size = (
            attributes[name] for name in ("num_experts", "hidden_size", "intermediate_size")
        )
        rows = x.reshape(-1, hidden)
        result = np.zeros(rows.shape, np.float32)
        for token, (experts, weights) in enumerate(
            zip(chosen.reshape(len(rows), -1), shares.reshape(len(rows), -1), strict=True)
        ):
            for expert, weight in zip(experts, weights, strict=True):
                both, last = (part.reshape(count, -1)[expert] for part in (gate_up, down))
                turns = {**attributes, "in_features": hidden}
                matrix = _separated(_unpacked(both, 32 * math.ceil(size / 16), turns), size)
                product = rounded(rows[token], attributes["rounding"], 0.0) @ matrix
                inner = ACTIVATIONS[attributes["gate"]](product[:size]) * product[size:]
                form = {name: attributes[f"down_{name}"] for name in ("format", "scale_format")}
                matrix = _unpacked(last, hidden, {**form, "in_features": size})
                result[token] += weight * (rounded(inner, attributes["down_input"], 0.0) @ matrix)
        result = result.reshape(x.shape)
        return (result if residual is None else result + residual,)


class CachedAttention(OpRun):
    op_domain = "kvgraph"

    def _run(
        self, qkv, past_length, past_key, past_value, cos=None, sin=None, q_norm=None, k_norm=None, num_heads=0,
        kv_num_heads=0, head_dim=0, scale=0.0, window=0, rotary_dim=0, interleaved=0, softcap=0.0, norm_epsilon=0.0,
    ):  # fmt: skip
        batch, tokens, _ = qkv.shape
        heads = qkv.reshape(batch, tokens, -1, head_dim)
        q, k, v = np.split(heads, [num_heads, num_heads + kv_num_heads], axis=2)
        q, k = (_normed(x, norm, norm_epsilon) for x, norm in ((q, q_norm), (k, k_norm)))
        if cos is not None:
            q, k = (_rotated(x, cos, sin, rotary_dim, bool(interleaved)) for x in (q, k))
        keys, values = past_key.copy(), past_value.copy()
        out = np.empty((batch, tokens, num_heads, head_dim), np.float32)
        for b in range(batch):
            start = int(past_length[b])
            keys[b, :, start : start + tokens] = k[b].transpose(1, 0, 2)
            values[b, :, start : start + tokens] = v[b].transpose(1, 0, 2)
            for s in range(tokens):
                position = start + s
                first = max(0, position - window + 1) if window else 0
                for h in range(num_heads):
                    group = h * kv_num_heads // num_heads
                    scores = keys[b, group, first : position + 1] @ q[b, s, h] * np.float32(scale)
                    if softcap:
                        scores = softcap * np.tanh(scores / softcap)
                    weights = np.exp(scores - scores.max())
                    out[b, s, h] = weights / weights.sum() @ values[b, group, first : position + 1]
        return out.reshape(batch, tokens, -1), keys, values


def _normed(x: Floats, weight: Floats | None, epsilon: float) -> Floats:
    if weight is None:
        return x
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight


def _rotated(x: Floats, cos: Floats, sin: Floats, rotary_dim: int, interleaved: bool) -> Floats:
    """Pairs of the first `rotary_dim` entries of each head, by the angle of their position."""
    result, half = x.copy(), rotary_dim // 2
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    cos, sin = cos[:, :, None], sin[:, :, None]
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., first] * sin + x[..., second] * cos
    return result


OPERATORS = [PackedLinear, PackedGather, PackedExperts, CachedAttention]


def evaluator(path: Path) -> ReferenceEvaluator:
    """A graph that may hold these operators, in ONNX's own evaluator."""
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in node.attribute:
            # The evaluator's own classes have another `input`.
            if node.op_type in ("PackedLinear", "PackedExperts") and attribute.name == "input":
                attribute.name = "rounding"
    return ReferenceEvaluator(model, new_ops=OPERATORS)


class ReferenceSession:
    """Graphs that hold these operators, run by ONNX's own evaluator.

    Args:
        files: The graphs by role; prefill may do decode's work.
        contract: What they promise.
    """

    def __init__(self, files: Mapping[GraphName, Path], contract: Contract) -> None:
        opened = {path: evaluator(path) for path in set(files.values())}
        self._graphs = {graph: opened[path] for graph, path in files.items()}
        self._contract = contract

    def allocate_cache(self, batch_size: int, limit: int = 64) -> dict[str, Floats]:
        shapes = {
            state.name: (batch_size, int(state.shape[1]), limit, int(state.shape[3]))
            for state in self._contract.state
        }
        return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def prefill(
        self, cache: dict[str, Floats], ids: Ids, past: Ids, positions: Ids, new_length: Ids | None = None
    ) -> Floats:
        return self._run("prefill", cache, ids, past, positions, new_length)

    def decode(self, cache: dict[str, Floats], ids: Ids, past: Ids) -> Floats:
        return self._run("decode", cache, ids, past, np.zeros((len(ids), 1), np.int64), None)

    def _run(
        self,
        graph: GraphName,
        cache: dict[str, Floats],
        ids: Ids,
        past: Ids,
        positions: Ids,
        new_length: Ids | None,
    ) -> Floats:
        evaluator = self._graphs[graph]
        gained = np.full(len(ids), ids.shape[1]) if new_length is None else new_length
        feeds = {
            "input_ids": ids,
            "past_length": past,
            "logit_positions": positions,
            "new_length": gained,
            **cache,
        }
        outputs = evaluator.run(None, {name: feeds[name] for name in evaluator.input_names})
        found = dict(zip(evaluator.output_names, outputs, strict=True))
        for state in self._contract.state:
            cache[state.name][...] = found[state.output]
        return found["logits"]
