"""Which weights of a graph can be quantized, and why others cannot."""

from __future__ import annotations

import onnx
import onnx.parser
import onnx_ir as ir

from kvgraph.export.bundle import Bundle
from kvgraph.quant.linears import Linear, find_linears

LAYER_LINEARS = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]


def test_llama_in_the_order_of_its_graph(tiny: Bundle) -> None:
    found = find_linears(ir.load(tiny.graph_path("decode")))
    layers = [f"model.layers.{layer}.{name}" for layer in range(2) for name in LAYER_LINEARS]
    modules = [linear.module for linear in found.linears]
    assert sorted(modules) == sorted(["model.embed_tokens", *layers, "lm_head"])
    assert [modules[0], modules[-1]] == ["model.embed_tokens", "lm_head"]
    assert [module.split(".")[2] for module in modules[1:-1]] == ["0"] * 7 + ["1"] * 7
    assert not found.others


def test_shapes_and_kinds(tiny: Bundle) -> None:
    found = {linear.module: linear for linear in find_linears(ir.load(tiny.graph_path("prefill"))).linears}
    down = found["model.layers.0.mlp.down_proj"]
    assert down == Linear(down.module, f"{down.module}.weight", "matmul", (44, 20))
    assert (down.inputs, down.outputs) == (44, 20)
    table = found["model.embed_tokens"]
    assert (table.kind, table.shape, table.inputs, table.outputs) == ("table", (97, 20), 20, 97)


def test_tied_head_is_the_embedding_table(tied: Bundle) -> None:
    found = {linear.module: linear for linear in find_linears(ir.load(tied.graph_path("prefill"))).linears}
    assert found["model.embed_tokens"].kind == "table"
    assert "lm_head" not in found


def test_other_weights_have_a_reason() -> None:
    zeros = ", ".join(["0"] * 32)
    model = onnx.parser.parse_model(f"""
        <ir_version: 11, opset_import: ["" : 24]>
        g (float[B, 4] x, int64[B] ids) => (float[B, 4] y, float[2, 4, 4] z, float[B, 3] p, float[4, B] t)
        <float[4, 4] a_weight = {{{zeros[:46]}}}, float[2, 4, 4] b_weight = {{{zeros}}},
         float[2, 3] c_weight = {{{zeros[:16]}}}, float[4, 4] d_bias = {{{zeros[:46]}}},
         float[4, 4] e_weight = {{{zeros[:46]}}}>
        {{
            product = MatMul(x, a_weight)
            y = MatMul(product, d_bias)
            z = Neg(b_weight)
            p = Gather(c_weight, ids)
            t0 = Transpose(x)
            t = MatMul(e_weight, t0)
        }}""")
    # The text form cannot spell names with dots.
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.replace("_", ".")
    for node in model.graph.node:
        node.input[:] = [name.replace("_", ".") for name in node.input]
    found = find_linears(ir.from_proto(model))
    assert [linear.module for linear in found.linears] == ["a"]
    assert found.others == {
        "b.weight": "[2, 4, 4] is read by Neg, which has no quantized form",
        "c.weight": "is a table other than the token embedding",
        "e.weight": "[4, 4] is read by MatMul, which has no quantized form",
    }
