"""Measures the forms of a mixture of experts on ONNX Runtime CPU: `python experts.py [--threads N]`.

One layer's router and experts, traced as the exporter traces them, in each form of `kvgraph.models.experts`: for one
token, for some rows of one token (decode of a batch) and for prompts. The forms take turns, and the medians are shown.
With `--packed` the form that the exporter would choose takes turns with the operators of kvgraph's CPU kernels instead,
in floats and in 4 bits, there also with ONNX Runtime's contributed operator QMoE.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn

from kvgraph.export.packed.target_weights import TargetWeights
from kvgraph.export.targets.ort_cpu_graph import lower_to_kernels
from kvgraph.export.trace import Argument, trace
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.models.experts import GROUPED_FROM, Experts, Router
from kvgraph.models.layers import Precision
from kvgraph.runtime.kernels import library_path

FLOAT32 = Precision(torch.float32, torch.float32)
FORMS = ("gathered", "everywhere", "grouped")
# Experts, chosen by a token, hidden size, width of an expert: few experts as in Mixtral, many as in Qwen.
SHAPES = ((8, 2, 512, 1024), (64, 4, 512, 384))
DECODED = (1, 2, 4, 8)
PROMPTS = (16, 64, 128, 256, 512, 1024)
# The two forms of a prompt may add in another order; integers round their input, too.
TOLERANCE = 1e-3
ROUNDED_TOLERANCE = 0.3
# The shape whose packed form is measured.
PACKED_SHAPE = (16, 4, 1024, 1408)


class Block(nn.Module):
    """A router and its experts in one form."""

    def __init__(self, gate: Router, experts: Experts, form: str) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        result: Tensor = getattr(self.experts, self.form)(rows, *self.gate(rows))
        return result.view(x.shape)


def blocks(shape: tuple[int, int, int, int]) -> dict[str, Block]:
    """The same weights in every form."""
    num_experts, top_k, hidden_size, size = shape
    torch.manual_seed(0)
    gate = Router(hidden_size, num_experts, top_k, normalized=True)
    experts = Experts(num_experts, hidden_size, size, "silu", FLOAT32)
    for parameter in (*gate.parameters(), *experts.parameters()):
        parameter.requires_grad_(False).normal_().div_(parameter.shape[-2] ** 0.5)
    return {form: Block(gate, experts, form) for form in FORMS}


def model_of(block: Block, new_tokens: int | str) -> ir.Model:
    """The traced block with its weights."""
    hidden_size = block.gate.weight.shape[0]
    graph = trace(block, [Argument("x", torch.float32, ("B", new_tokens, hidden_size))])
    for name, value in graph.initializers.items():
        if value.const_value is None:
            value.const_value = ir.tensor(
                block.get_parameter(name.removeprefix("traced.")).numpy(), name=name
            )
    graph.inputs[0].name = "x"
    return ir.Model(graph, ir_version=10)


def round_experts(model: ir.Model) -> None:
    """Experts' weights as INT4 in blocks of 32 inputs, as `quantize --recipe int4-wo` leaves them."""
    for name, value in list(model.graph.initializers.items()):
        if ".experts." not in name or value.const_value is None:
            continue
        codes, scale = round_blocks(torch.from_numpy(value.const_value.numpy()))
        parts = []
        for part, array in (("codes", codes.astype(ml_dtypes.int4)), ("scale", scale)):
            tensor = ir.Tensor(array, name=f"{name}.{part}")
            parts.append(ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype)))
            parts[-1].const_value = tensor
            model.graph.register_initializer(parts[-1])
        attributes = [ir.AttrInt64("axis", 1), ir.AttrInt64("block_size", 32)]
        node = ir.Node("", "DequantizeLinear", parts, attributes, name=f"{name}.node", num_outputs=1)
        node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
        value.replace_all_uses_with(node.outputs[0])
        del model.graph.initializers[name]
        model.graph.insert_before(model.graph[0], node)


def round_blocks(weight: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Experts' weights [X, in, out] as codes -7 ... 7 of that shape, and scales [X, in / 32, out]."""
    count, inputs, outputs = weight.shape
    blocks = weight.numpy().reshape(count, inputs // 32, 32, outputs)
    scale = np.abs(blocks).max(axis=2, keepdims=True).astype(np.float32) / 7
    return np.rint(blocks / scale).reshape(weight.shape), scale[:, :, 0]


def contributed(block: Block, threads: int) -> Any:
    """The same layer in 4 bits as ONNX Runtime's QMoE, in whose first matrix the outputs of gate and up take turns."""
    experts, constants = block.experts, {"router": block.gate.weight.numpy()}
    gate, up = round_blocks(experts.gate_proj.weight), round_blocks(experts.up_proj.weight)
    both = [np.stack(pair, axis=3).reshape(*pair[0].shape[:2], -1) for pair in zip(gate, up, strict=True)]
    for name, (codes, scale) in {"1": both, "2": round_blocks(experts.down_proj.weight)}.items():
        halves = np.ascontiguousarray((codes + 8).astype(np.uint8).transpose(0, 2, 1))
        constants[f"codes{name}"] = halves[..., ::2] | halves[..., 1::2] << 4
        constants[f"scale{name}"] = np.ascontiguousarray(scale.transpose(0, 2, 1))
    hidden_size = block.gate.weight.shape[0]
    options = {
        "k": block.gate.top_k,
        "expert_weight_bits": 4,
        "block_size": 32,
        "normalize_routing_weights": 1,
    }
    # gate * sigmoid(alpha gate) * (up + beta), nothing cut off.
    options |= {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0}
    inputs = ["rows", "scores", "codes1", "scale1", "", "codes2", "scale2", ""]
    graph = onnx.parser.parse_graph(
        f"""block (float[B, S, {hidden_size}] x) => (float[B, S, {hidden_size}] y) {{
            width = Constant <value_ints = [-1, {hidden_size}]> ()
            rows = Reshape (x, width)
            scores = MatMul (rows, router)
            shape = Shape (x)
            y = Reshape (sums, shape)
        }}"""
    )
    node = onnx.helper.make_node(
        "QMoE", inputs, ["sums"], domain="com.microsoft", activation_beta=0.0, swiglu_limit=1e9, **options
    )
    graph.node.insert(3, node)
    graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    domains = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=domains, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])


def session(model: ir.Model, threads: int, library: Path | None = None) -> Any:
    """A graph as it stands, or in the operators of a library."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        if library is None:
            ir.save(model, path, external_data="model.data")
        else:
            options.register_custom_ops_library(str(library))
            lower_to_kernels(model)
            weights = TargetWeights([model])
            weights.place()
            weights.write(Path(folder) / WEIGHTS_FILE)
            path.write_bytes(ir.to_proto(model).SerializeToString())
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def medians_ms(
    sessions: dict[str, Any], x: np.ndarray[Any, Any], rounds: int, tolerance: float = TOLERANCE
) -> dict[str, float]:
    """Median time of each session, which must agree."""
    times: dict[str, list[float]] = {form: [] for form in sessions}
    expected = next(iter(sessions.values())).run(None, {"x": x})[0]
    for _ in range(rounds):
        for form, runner in sessions.items():
            start = time.perf_counter()
            (found,) = runner.run(None, {"x": x})
            times[form].append((time.perf_counter() - start) * 1e3)
            np.testing.assert_allclose(found, expected, atol=tolerance)
    return {form: statistics.median(taken) for form, taken in times.items()}


def measure(shape: tuple[int, int, int, int], threads: int, rounds: int) -> None:
    """Print a line for every step."""
    num_experts, top_k, hidden_size, size = shape
    print(f"{num_experts} experts, {top_k} for a token, hidden size {hidden_size}, width {size}, float32")
    made, random = blocks(shape), np.random.default_rng(0)
    plans: list[tuple[str, int | str, tuple[str, ...], list[tuple[int, int]]]] = [
        ("decode", 1, ("gathered", "everywhere"), [(batch, 1) for batch in DECODED]),
        ("prompt", "S", ("everywhere", "grouped"), [(1, length) for length in PROMPTS]),
    ]
    for step, new_tokens, forms, sizes in plans:
        sessions = {form: session(model_of(made[form], new_tokens), threads) for form in forms}
        for batch, length in sizes:
            x = random.standard_normal((batch, length, hidden_size)).astype(np.float32)
            found = medians_ms(sessions, x, rounds if length == 1 else max(3, rounds // 4))
            (other,) = set(forms) - {"everywhere"}
            ratio = found["everywhere"] / found[other]
            shown = ", ".join(f"{form} {taken:.2f} ms" for form, taken in found.items())
            print(f"  {step}, {batch} x {length}: {shown}: {other} is {ratio:.2f} times as fast", flush=True)


def measure_packed(shape: tuple[int, int, int, int], bits: int, threads: int, rounds: int) -> None:
    """Print a line for every step: what the exporter writes, and the same in kvgraph's operators."""
    num_experts, top_k, hidden_size, size = shape
    name = "float32" if bits == 32 else f"int{bits}"
    print(f"{num_experts} experts, {top_k} for a token, hidden size {hidden_size}, width {size}, {name}")
    made, random = blocks(shape), np.random.default_rng(0)
    prompt = "grouped" if num_experts >= GROUPED_FROM * top_k else "everywhere"
    for step, new_tokens, form, lengths in (
        ("decode", 1, "gathered", DECODED),
        ("prompt", "S", prompt, PROMPTS[1:]),
    ):
        sessions = {}
        for kernels, library in (("onnxruntime", None), ("kvgraph", library_path())):
            model = model_of(made[form], new_tokens)
            if bits == 4:
                round_experts(model)
            sessions[kernels] = session(model, threads, library)
        if bits == 4:
            sessions["QMoE"] = contributed(made[form], threads)
        for count in lengths:
            rows = (count, 1) if new_tokens == 1 else (1, count)
            x = random.standard_normal((*rows, hidden_size)).astype(np.float32)
            tolerance = TOLERANCE if bits == 32 else ROUNDED_TOLERANCE
            found = medians_ms(sessions, x, rounds if new_tokens == 1 else max(3, rounds // 4), tolerance)
            ratio = min(taken for kernels, taken in found.items() if kernels != "kvgraph") / found["kvgraph"]
            shown = ", ".join(f"{kernels} {taken:.2f} ms" for kernels, taken in found.items())
            print(f"  {step}, {rows[0]} x {rows[1]}: {shown}: {ratio:.2f} times as fast", flush=True)


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21, help="of decode; prompts take a quarter of them")
    parser.add_argument("--packed", action="store_true", help="measure kvgraph's operators")
    args = parser.parse_args()
    if args.packed:
        for bits in (32, 4):
            measure_packed(PACKED_SHAPE, bits, args.threads, args.rounds)
        return
    for shape in SHAPES:
        measure(shape, args.threads, args.rounds)


if __name__ == "__main__":
    main()
