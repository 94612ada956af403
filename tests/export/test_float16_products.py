"""Layers that add more than float16 holds, exported in float16 with a float32 residual stream.

ONNX Runtime computes float16 in float32 on a CPU and drops the casts between operators, which hides an overflow. So
every float16 value of a graph is made an output of it: an output is really rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401 -- NumPy learns the types of ONNX from it
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import ENCODE, INPUT_IDS, LOGITS, GraphName
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt

LARGEST, VOCABULARY = 65504.0, 97
# Of the logits' largest magnitude: float16 keeps 11 bits of what goes into each product.
TOLERANCE = 0.02
SOURCE, PROMPT = [[5, 17, 80, 3, 3, 41, 9]], [[1, 60, 8, 77, 12, 30]]


class Case(NamedTuple):
    """A family, changes to its tiny config, and factors of weights by what their names end with."""

    model_type: str
    changes: dict[str, Any]
    factors: Mapping[str, float]
    biased: bool = False


WIDE = {"initializer_range": 0.4, "intermediate_size": 64}
T5 = {
    "d_model": 20,
    "d_kv": 8,
    "d_ff": 44,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "feed_forward_proj": "gated-gelu",
}
CASES = {
    "down": Case("llama", WIDE, {"layers.1.mlp.down_proj.weight": 6000.0}),
    # Its input, the gated product, is out of range as well.
    "gate and up": Case(
        "llama",
        WIDE,
        {
            "layers.0.mlp.gate_proj.weight": 100.0,
            "layers.0.mlp.up_proj.weight": 200.0,
            "layers.0.mlp.down_proj.weight": 50.0,
        },
    ),
    "attention": Case("llama", WIDE, {"layers.0.self_attn.o_proj.weight": 20000.0}),
    "biases": Case(
        "gpt2",
        {"n_inner": 44, "hidden_size": 32, "num_key_value_heads": 4},
        {"mlp.c_proj.weight": 4e4, "mlp.c_proj.bias": 3e4},
    ),
    "experts": Case(
        "mixtral",
        {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2},
        {f"experts.{expert}.w2.weight": 6000.0 for expert in range(4)},
    ),
    "grouped experts": Case(
        "mixtral",
        {**WIDE, "num_local_experts": 8, "num_experts_per_tok": 1},
        {f"experts.{expert}.w2.weight": 6000.0 for expert in range(8)},
    ),
    "encoder and decoder": Case(
        "t5",
        T5,
        {"wi_0.weight": 20.0, "wi_1.weight": 20.0, "wo.weight": 250.0, "EncDecAttention.o.weight": 2000.0},
    ),
}


@pytest.fixture(scope="module")
def make_checkpoint(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The checkpoint of a case."""

    @functools.cache
    def make(name: str) -> Path:
        case, path = CASES[name], tmp_path_factory.mktemp("large") / "checkpoint"
        if case.model_type == "t5":
            torch.manual_seed(7)
            model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **case.changes))
        else:
            source = tiny_checkpoint(case.model_type, **case.changes)
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        model.save_pretrained(path)
        weights = load_file(path / "model.safetensors")
        for ending, factor in case.factors.items():
            scaled = [weight for weight in weights if weight.endswith(ending)]
            assert scaled, ending
            for weight in scaled:
                weights[weight] *= factor
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        return path

    return make


def reference(path: Path, encodes: bool) -> tuple[np.ndarray, float]:
    """Logits [1, S, V] of transformers in float32, and the most that a layer's part adds to the stream."""
    kind = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    added = []
    for name, module in model.named_modules():
        if name.endswith((".mlp", ".self_attn", ".block_sparse_moe", ".DenseReluDense", ".EncDecAttention")):
            module.register_forward_hook(lambda _m, _i, result: added.append(largest(result)))
    prompt = torch.tensor(PROMPT)
    with torch.no_grad():
        if encodes:
            logits = model(input_ids=torch.tensor(SOURCE), decoder_input_ids=prompt).logits
        else:
            logits = model(prompt).logits
    return logits.numpy(), max(added)


def largest(result: Any) -> float:
    values = result[0] if isinstance(result, tuple) else result
    return float(values.abs().max())


def run(bundle: Bundle, graph: GraphName, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every output of a graph, and every value of it that is float16, rounded to float16."""
    model = ir.from_proto(onnx.load(bundle.graph_path(graph), load_external_data=False))
    present = {value.name for value in model.graph.outputs}
    halves = [
        value
        for node in model.graph
        for value in node.outputs
        if value.dtype == ir.DataType.FLOAT16 and value.name not in present
    ]
    model.graph.outputs.extend(halves)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle.path))
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    names = [value.name for value in session.get_outputs()]
    wanted = {value.name for value in session.get_inputs()}
    results = session.run(names, {name: value for name, value in feeds.items() if name in wanted})
    return dict(zip(names, results, strict=True))


def steps(bundle: Bundle) -> Iterator[dict[str, np.ndarray]]:
    """What the graphs give: the encoder's, those of the prompt without its last token, those of the last token."""
    feeds: dict[str, np.ndarray] = {}
    if bundle.contract.encoder is not None:
        feeds["encoder_length"] = np.array([len(SOURCE[0])])
        found = run(bundle, ENCODE, {**feeds, INPUT_IDS: np.array(SOURCE)})
        yield found
        feeds.update({tensor.name: found[tensor.name] for tensor in bundle.contract.encoder.cross})
    ids, last = np.array(PROMPT), len(PROMPT[0]) - 1
    cache = {
        tensor.name: np.zeros((1, int(tensor.shape[1]), 16, int(tensor.shape[3])), np.float16)
        for tensor in bundle.contract.state
    }
    prompt = {INPUT_IDS: ids[:, :last], "past_length": np.zeros(1, np.int64)}
    found = run(bundle, "prefill", {**feeds, **cache, **prompt, "logit_positions": np.arange(last)[None]})
    yield found
    cache = {tensor.name: found[tensor.output] for tensor in bundle.contract.state}
    yield run(bundle, "decode", {**feeds, **cache, INPUT_IDS: ids[:, last:], "past_length": np.array([last])})


@pytest.mark.parametrize("name", CASES)
def test_a_layer_may_add_more_than_float16_holds(
    name: str, make_checkpoint: Callable[[str], Path], exported: Callable[..., Bundle]
) -> None:
    checkpoint = make_checkpoint(name)
    expected, added = reference(checkpoint, encodes=CASES[name].model_type == "t5")
    assert added > LARGEST
    found = list(steps(exported(checkpoint, dtype="float16", residual_dtype="float32")))
    for step in found:
        for value, content in step.items():
            assert np.isfinite(content).all(), value
    logits = np.concatenate([step[LOGITS] for step in found if LOGITS in step], axis=1)
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("name", ["down", "encoder and decoder"])
def test_a_float16_stream_does_not_hold_them(
    name: str, make_checkpoint: Callable[[str], Path], exported: Callable[..., Bundle]
) -> None:
    with np.errstate(all="ignore"):
        found = list(steps(exported(make_checkpoint(name), dtype="float16")))
    assert not all(np.isfinite(content).all() for step in found for content in step.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_they_build_in_tensorrt_rtx(
    name: str, make_checkpoint: Callable[[str], Path], exported: Callable[..., Bundle]
) -> None:
    bundle = exported(make_checkpoint(name), dtype="float16", residual_dtype="float32")
    options = TensorRTOptions(max_batch=2, max_context=16, compute_capabilities=(89,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (89,)
