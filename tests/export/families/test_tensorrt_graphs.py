"""The graphs that TensorRT is given, which cut the cache to the context in use, computed by ONNX Runtime."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from family_cases.references import Reference

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import CONTEXT_LENGTH, GraphName
from kvgraph.export.passes.slice_cache import slice_cache
from kvgraph.export.targets.tensorrt_graph import lower_for_tensorrt

# float32 sums in another order, on logits of up to 8.
TOLERANCE = 1e-4
ENCODERS = ("t5", "bart")
# Each has another kind of mask, of attention or of rope.
LOWERED = [
    "gemma2",
    "gemma3_text",
    "smollm3",
    "phi3",
    "qwen2_moe",
    "falcon, ALiBi over one key/value head",
    "bloom",
]


@pytest.mark.parametrize("name", LOWERED)
def test_graph_for_tensorrt_computes_the_same_over_the_context_in_use(
    bundle: Bundle, right: Reference, tmp_path: Path
) -> None:
    capacity, past = 48, np.array([20, 11])
    lowered = lower_for_tensorrt(bundle.graph_path("prefill"), "prefill", bundle.contract, capacity)
    (tmp_path / "lowered.onnx").write_bytes(lowered.model)
    shutil.copy(bundle.path / "weights.safetensors", tmp_path)
    random = np.random.default_rng(0)
    feeds = {
        "input_ids": right.ids[:2, :3],
        "past_length": past,
        "logit_positions": np.array([[2], [0]]),
    }
    if bundle.contract.takes_new_length:
        feeds["new_length"] = np.array([3, 3])
    for tensor in bundle.contract.state:
        shape = (2, tensor.shape[1], capacity, tensor.shape[3])
        feeds[tensor.name] = random.standard_normal(shape).astype(np.float32)
    whole = run_onnx(bundle.graph_path("prefill"), feeds)
    for context in (past.max() + 3, capacity):
        cut = run_onnx(tmp_path / "lowered.onnx", {**feeds, CONTEXT_LENGTH: np.array([context])})
        for found, expected in zip(cut, whole, strict=True):
            np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def run_onnx(path: Path, feeds: dict[str, Any]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    results: list[Any] = onnxruntime.InferenceSession(str(path), options).run(None, feeds)
    return results


@pytest.mark.parametrize("name", ["gemma2"])
def test_capped_attention_neither_repeats_nor_tiles_keys(bundle: Bundle) -> None:
    model = onnx.load(bundle.graph_path("decode"), load_external_data=False)
    operators = [node.op_type for node in model.graph.node]
    assert {"Tanh", "Where", "Softmax"} <= set(operators)
    assert not {"Attention", "Expand", "Tile", "Concat"} & set(operators)
    # The only shape that anything asks for is the capacity.
    assert operators.count("Shape") == 1


@pytest.mark.parametrize("graph", ["prefill", "decode"])
@pytest.mark.parametrize("name", ENCODERS)
def test_tensorrt_cuts_the_cache_to_the_context_and_leaves_the_source_whole(
    bundle: Bundle, graph: GraphName
) -> None:
    model = ir.from_proto(onnx.load(bundle.graph_path(graph), load_external_data=False))
    assert slice_cache(model, bundle.contract)
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    cross = [node for node in attentions if node.inputs[1].name.startswith("cross.")]
    assert len(cross) * 2 == len(attentions)
    for node in attentions:
        # What follows the context length is cut: keys by Slice, masks by having asked for it.
        key_is_cut = node.inputs[1].producer() is not None
        assert key_is_cut == (node not in cross)
        assert follows(node.inputs[3], CONTEXT_LENGTH) == (node not in cross)


def follows(value: ir.Value, name: str) -> bool:
    """Whether a value depends on the input `name`."""
    if value.name == name:
        return True
    producer = value.producer()
    inputs = () if producer is None else producer.inputs
    return any(entry is not None and follows(entry, name) for entry in inputs)
