"""The forms in which canonical graphs hold a mixture of experts (`kvgraph.models.experts`), as patterns.

Each one computes y [N, E] of x [N, E], weights [N, k], chosen [N, k], and gate, up and down [X, in, out]. Its other
inputs are constants that depend on those sizes: `constants` says what they have to be.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

# a of g.
ACTIVATIONS = {
    "silu": "q = Sigmoid(g) a = Mul(g, q)",
    "gelu": "a = Gelu(g)",
    "gelu_tanh": 'a = Gelu<approximate = "tanh">(g)',
    "relu": "a = Relu(g)",
}

# What the chosen experts of each token gave, o, weighted and added.
_SUM = """
    p = Reshape(o, parts) s = Unsqueeze(weights, last) m = Mul(p, s) y = ReduceSum<keepdims = 0>(m, first)
"""

_GATHERED = (
    """
    flat = Reshape(chosen, last) expert = Reshape(flat, last)
    x1 = Unsqueeze(x, first) x2 = Expand(x1, copies) x3 = Reshape(x2, rows) x4 = Unsqueeze(x3, first)
    wg = Gather(gate, expert) wu = Gather(up, expert) wd = Gather(down, expert)
    g = MatMul(x4, wg) u = MatMul(x4, wu) ACTIVATION i = Mul(a, u) o = MatMul(i, wd)
"""
    + _SUM
)

_EVERYWHERE = """
    c1 = Unsqueeze(chosen, last) c2 = Equal(c1, numbers) c3 = Cast<to = 1>(c2)
    s1 = Unsqueeze(weights, last) s2 = Mul(s1, c3) s3 = ReduceSum<keepdims = 0>(s2, first)
    s4 = Transpose<perm = [1, 0]>(s3) share = Unsqueeze(s4, last)
    g = MatMul(x, gate) u = MatMul(x, up) ACTIVATION i = Mul(a, u) o = MatMul(i, down)
    n = Equal(share, nothing) m = Mul(o, share) h = Where(n, nothing, m) y = ReduceSum<keepdims = 0>(h, axis_0)
"""

# Python's `//` as it is traced: the quotient, one less where it was rounded up.
_FLOORED = "{0}4 = Mod({1}) {0}5 = Cast<to = 9>({0}4) {0}6 = And({0}3, {0}5) {0}7 = Cast<to = 7>({0}6)"

_GROUPED = (
    f"""
    choices = Mul(tokens, top_k)
    r1 = Add(choices, experts) r2 = Sub(r1, one) size = Div(r2, experts)
    r3 = Sub(size, one) r4 = Mul(experts, r3) r5 = Add(choices, r4) blocks = Div(r5, size)
    c1 = Reshape(chosen, last) c2 = Unsqueeze(c1, first) c3 = Equal(c2, numbers) is_chosen = Cast<to = 7>(c3)
    so_far = CumSum(is_chosen, zero) each = Gather(so_far, minus) d1 = Add(each, size) above = Sub(d1, one)
    d2 = Less(above, zero) d1_ = Greater(size, zero) d3 = Equal(d2, d1_)
    {_FLOORED.format("d", "above, size")} d8 = Div(above, size) count = Sub(d8, d7)
    ends = CumSum(count, zero) f1 = Sub(ends, count) f2 = Mul(f1, size) f3 = Add(f2, so_far) f4 = Sub(f3, one)
    f5 = Mul(f4, is_chosen) slots = ReduceSum<keepdims = 0>(f5, first)
    b1 = Range(zero, blocks, one) b2 = Unsqueeze(b1, first) b3 = GreaterOrEqual(b2, ends) b4 = Cast<to = 7>(b3)
    b5 = ReduceSum<keepdims = 0>(b4, first) b6 = Clip(b5, , last_expert) expert = Reshape(b6, last)
    e1 = Mul(blocks, size) e2 = Reshape(e1, last) empty = Expand(zero, e2)
    t1 = Range(zero, choices, one) t2 = Less(t1, zero) t3 = Equal(t2, yes)
    {_FLOORED.format("t", "t1, top_k")} t8 = Div(t1, top_k) t9 = Sub(t8, t7)
    t10 = ScatterElements(empty, slots, t9) token = Reshape(t10, last)
    x1 = Gather(x, token) x2 = Reshape(blocks, last) x3 = Reshape(size, last) x4 = Concat<axis = 0>(x2, x3, hidden)
    x5 = Reshape<allowzero = 1>(x1, x4)
    wg = Gather(gate, expert) wu = Gather(up, expert) wd = Gather(down, expert)
    g = MatMul(x5, wg) u = MatMul(x5, wu) ACTIVATION i = Mul(a, u) o1 = MatMul(i, wd)
    o2 = Reshape(o1, rows) o3 = Reshape(slots, last) o = Gather(o2, o3)
"""
    + _SUM
)

_FORMS = (_GATHERED, _EVERYWHERE, _GROUPED)

_INPUTS = """float x, float weights, int64 chosen, float gate, float up, float down, int64 tokens, int64 top_k,
    int64 experts, int64 last_expert, int64 copies, int64 rows, int64 parts, int64 hidden, int64 numbers"""
_CONSTANTS = """int64[1] last = {-1}, int64[1] first = {1}, int64[1] axis_0 = {0}, int64 zero = {0}, int64 one = {1},
    int64 minus = {-1}, float nothing = {0}, bool yes = {1}"""


@functools.cache
def patterns() -> tuple[tuple[str, ir.Graph], ...]:
    """Every form with every activation, whose name comes first."""
    return tuple(
        (name, _pattern(form.replace("ACTIVATION", activation)))
        for form in _FORMS
        for name, activation in ACTIVATIONS.items()
    )


def _pattern(body: str) -> ir.Graph:
    text = f'<ir_version: 11, opset_import: ["" : 24]> g ({_INPUTS}) => (float y) <{_CONSTANTS}> {{ {body} }}'
    return ir.from_onnx_text(text).graph


def constants(experts: int, top_k: int, hidden_size: int) -> dict[str, NDArray[np.int64]]:
    """The other inputs of patterns. `tokens` is N, or the shapes within a graph would not fit together."""
    found: dict[str, int | list[int]] = {
        "top_k": top_k,
        "experts": experts,
        "last_expert": experts - 1,
        "copies": [1, top_k, 1],
        "rows": [-1, hidden_size],
        "parts": [-1, top_k, hidden_size],
        "hidden": [hidden_size],
        "numbers": list(range(experts)),
    }
    return {name: np.array(content, np.int64) for name, content in found.items()}
