"""Measures the forms of a mixture of experts on ONNX Runtime CPU: `python experts.py [--threads N]`.

One layer's router and experts, traced as the exporter traces them, in each form of `kvgraph.models.experts`: for one
token, for some rows of one token (decode of a batch) and for prompts. The forms take turns, and the medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, nn

from kvgraph.export.trace import Argument, trace
from kvgraph.models.experts import Experts, Router
from kvgraph.models.layers import Precision

FLOAT32 = Precision(torch.float32, torch.float32)
FORMS = ("gathered", "everywhere", "grouped")
# Experts, chosen by a token, hidden size, width of an expert: few experts as in Mixtral, many as in Qwen.
SHAPES = ((8, 2, 512, 1024), (64, 4, 512, 384))
DECODED = (1, 2, 4, 8)
PROMPTS = (16, 64, 128, 256, 512, 1024)
# The two forms of a prompt may add in another order.
TOLERANCE = 1e-3


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


def session(block: Block, new_tokens: int | str, threads: int) -> Any:
    """The traced block with its weights."""
    hidden_size = block.gate.weight.shape[0]
    graph = trace(block, [Argument("x", torch.float32, ("B", new_tokens, hidden_size))])
    for name, value in graph.initializers.items():
        if value.const_value is None:
            value.const_value = ir.tensor(
                block.get_parameter(name.removeprefix("traced.")).numpy(), name=name
            )
    graph.inputs[0].name = "x"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def medians_ms(sessions: dict[str, Any], x: np.ndarray[Any, Any], rounds: int) -> dict[str, float]:
    """Median time of each session, which must agree."""
    times: dict[str, list[float]] = {form: [] for form in sessions}
    expected = next(iter(sessions.values())).run(None, {"x": x})[0]
    for _ in range(rounds):
        for form, runner in sessions.items():
            start = time.perf_counter()
            (found,) = runner.run(None, {"x": x})
            times[form].append((time.perf_counter() - start) * 1e3)
            np.testing.assert_allclose(found, expected, atol=TOLERANCE)
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
        sessions = {form: session(made[form], new_tokens, threads) for form in forms}
        for batch, length in sizes:
            x = random.standard_normal((batch, length, hidden_size)).astype(np.float32)
            found = medians_ms(sessions, x, rounds if length == 1 else max(3, rounds // 4))
            (other,) = set(forms) - {"everywhere"}
            ratio = found["everywhere"] / found[other]
            shown = ", ".join(f"{form} {taken:.2f} ms" for form, taken in found.items())
            print(f"  {step}, {batch} x {length}: {shown}: {other} is {ratio:.2f} times as fast", flush=True)


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=21, help="of decode; prompts take a quarter of them")
    args = parser.parse_args()
    for shape in SHAPES:
        measure(shape, args.threads, args.rounds)


if __name__ == "__main__":
    main()
