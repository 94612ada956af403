"""Every custom operator three ways: eager torch, its ONNX node on ONNX Runtime, and a NumPy formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgraph.export.trace import Argument, trace
from kvgraph.models import ops

# float32 sums in another order.
TOLERANCE = 2e-6
B, S, T, N, H, K, D, R = 3, 5, 11, 2, 4, 2, 8, 3

random = np.random.default_rng(11)
Arrays = dict[str, NDArray[Any]]


def floats(*shape: int) -> NDArray[np.float32]:
    return random.standard_normal(shape).astype(np.float32)


INPUTS: Arrays = {
    "query": floats(B, H, S, D),
    "past": floats(B, K, T, D),
    "update": floats(B, K, S, D),
    "visible": random.random((B, 1, S, T)) < 0.6,
    "added": floats(B, H, S, T),
    "cos": floats(B, S, D // 2),
    "sin": floats(B, S, D // 2),
    "few_cos": floats(B, S, R),
    "few_sin": floats(B, S, R),
    "x": floats(B, S, D),
    "past_length": np.array([0, 6, 3]),
    "rows": random.integers(0, S, (B, N)),
}
INPUTS["visible"][..., 0] = True
SHAPES: dict[str, tuple[str | int, ...]] = {
    "query": ("B", H, "S", D),
    "past": ("B", K, "T", D),
    "update": ("B", K, "S", D),
    "visible": ("B", 1, "S", "T"),
    "added": ("B", H, "S", "T"),
    "cos": ("B", "S", D // 2),
    "sin": ("B", "S", D // 2),
    "few_cos": ("B", "S", R),
    "few_sin": ("B", "S", R),
    "x": ("B", "S", D),
    "past_length": ("B",),
    "rows": ("B", "N"),
}
# Weight and bias of the norms, and the table of the tied head.
NORM, OFFSET, TABLE, EPSILON, SCALE = floats(D), floats(D), floats(13, D), 0.02, 0.3


def attention(mask: NDArray[np.float32]) -> NDArray[np.float32]:
    keys = np.repeat(INPUTS["past"], H // K, axis=1)
    scores = INPUTS["query"] @ keys.swapaxes(-1, -2) * SCALE + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ keys


def rotated(cos: str, sin: str, interleaved: bool) -> NDArray[np.float32]:
    """Pairs as complex numbers, turned by cos + i sin."""
    turn = (INPUTS[cos] + 1j * INPUTS[sin])[:, None]
    size = turn.shape[-1]
    result = INPUTS["query"].copy()
    even, odd = (
        (slice(0, 2 * size, 2), slice(1, 2 * size, 2))
        if interleaved
        else (
            slice(0, size),
            slice(size, 2 * size),
        )
    )
    pairs = (result[..., even] + 1j * result[..., odd]) * turn
    result[..., even], result[..., odd] = pairs.real, pairs.imag
    return result


def scattered() -> NDArray[np.float32]:
    result = INPUTS["past"].copy()
    for row, start in enumerate(INPUTS["past_length"]):
        result[row, :, start : start + S] = INPUTS["update"][row]
    return result


def hidden(mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(mask, 0, -np.inf).astype(np.float32)


x = INPUTS["x"]
centred = x - x.mean(-1, keepdims=True)
normed = centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + EPSILON) * NORM
FORMULAS: dict[str, Callable[[], NDArray[np.float32]]] = {
    "attention, boolean mask": lambda: attention(hidden(INPUTS["visible"])),
    "attention, added mask": lambda: attention(INPUTS["added"]),
    "rotary_embedding": lambda: rotated("cos", "sin", False),
    "rotary_embedding, interleaved": lambda: rotated("cos", "sin", True),
    "rotary_embedding, partial": lambda: rotated("few_cos", "few_sin", False),
    "rotary_embedding, partial and interleaved": lambda: rotated("few_cos", "few_sin", True),
    "rms_norm": lambda: x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON) * NORM,
    "layer_norm": lambda: normed + OFFSET,
    "layer_norm without a bias": lambda: normed,
    "tensor_scatter": scattered,
    "gather_rows": lambda: np.stack([row[chosen] for row, chosen in zip(x, INPUTS["rows"], strict=True)]),
    "tied_head": lambda: x.reshape(-1, D) @ TABLE.T,
    "row_scale": lambda: np.exp2(
        np.ceil(np.log2(np.maximum(np.abs(INPUTS["query"]).max(-1, keepdims=True), 1.0)))
    ),
}


class Operators(nn.Module):
    """All operators beside one another: one trace for all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.offset = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))
        self.table = nn.Parameter(torch.empty(13, D))

    def forward(self, **inputs: Tensor) -> tuple[Tensor, ...]:
        i = inputs
        return (
            ops.attention(i["query"], i["past"], i["past"], i["visible"], SCALE),
            ops.attention(i["query"], i["past"], i["past"], i["added"], SCALE),
            ops.rotary_embedding(i["query"], i["cos"], i["sin"], False),
            ops.rotary_embedding(i["query"], i["cos"], i["sin"], True),
            ops.rotary_embedding(i["query"], i["few_cos"], i["few_sin"], False),
            ops.rotary_embedding(i["query"], i["few_cos"], i["few_sin"], True),
            ops.rms_norm(i["x"], self.norm, EPSILON),
            ops.layer_norm(i["x"], self.norm, self.offset, EPSILON),
            ops.layer_norm(i["x"], self.norm, None, EPSILON),
            ops.tensor_scatter(i["past"], i["update"], i["past_length"]),
            ops.gather_rows(i["x"], i["rows"]),
            ops.tied_head(i["x"].flatten(0, 1), self.table),
            ops.row_scale(i["query"]),
        )


@pytest.fixture(scope="module")
def graph(quick_tracing: None) -> ir.Graph:
    arguments = [
        Argument(name, torch.from_numpy(array).dtype, SHAPES[name], keyword=True)
        for name, array in INPUTS.items()
    ]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return trace(Operators(), arguments)


@pytest.fixture(scope="module")
def traced(graph: ir.Graph) -> dict[str, NDArray[np.float32]]:
    """What ONNX Runtime computes."""
    for name, weight in (("traced.norm", NORM), ("traced.offset", OFFSET), ("traced.table", TABLE)):
        graph.initializers[name].const_value = ir.tensor(weight, name=name)
    data = ir.to_proto(ir.Model(graph, ir_version=11)).SerializeToString()
    feeds = {value.name: array for value, array in zip(graph.inputs, INPUTS.values(), strict=True)}
    results = onnxruntime.InferenceSession(data).run(None, feeds)
    return dict(zip(FORMULAS, results, strict=True))


@pytest.fixture(scope="module")
def eager() -> dict[str, NDArray[np.float32]]:
    module = Operators()
    module.norm.data, module.offset.data = torch.from_numpy(NORM), torch.from_numpy(OFFSET)
    module.table.data = torch.from_numpy(TABLE)
    with torch.no_grad():
        results = module(**{name: torch.from_numpy(array) for name, array in INPUTS.items()})
    return {name: result.numpy() for name, result in zip(FORMULAS, results, strict=True)}


@pytest.mark.parametrize("name", FORMULAS)
def test_eager_operator_equals_its_formula(name: str, eager: Arrays) -> None:
    np.testing.assert_allclose(eager[name], FORMULAS[name](), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("name", FORMULAS)
def test_node_on_onnx_runtime_equals_the_formula(name: str, traced: Arrays) -> None:
    np.testing.assert_allclose(traced[name], FORMULAS[name](), atol=TOLERANCE, rtol=TOLERANCE)


def test_every_operator_is_one_node_beside_what_prepares_its_inputs(graph: ir.Graph) -> None:
    operators = sorted(node.op_type for node in graph)
    expected = ["Attention"] * 2 + ["RotaryEmbedding"] * 4
    expected += ["LayerNormalization"] * 2
    expected += ["RMSNormalization", "TensorScatter", "GatherND", "Unsqueeze", "Gemm", "Reshape"]
    # There is no operator for a row's power of two.
    expected += ["Abs", "ReduceMax", "Max", "Log", "Mul", "Ceil", "Pow"]
    assert operators == sorted(expected)
    assert {node.domain for node in graph} == {""}


def test_dimensions_of_a_trace_carry_the_letters_of_its_arguments(graph: ir.Graph) -> None:
    for value, name in zip(graph.inputs, INPUTS, strict=True):
        assert tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape) == SHAPES[name]
    shapes = [
        tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape) for value in graph.outputs
    ]
    assert shapes == [
        *[("B", H, "S", D)] * 6,
        *[("B", "S", D)] * 3,
        ("B", K, "T", D),
        ("B", "N", D),
        # B * S, which is no letter.
        (None, 13),
        ("B", H, "S", 1),
    ]
