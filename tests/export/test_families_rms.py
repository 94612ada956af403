"""Decoders in the manner of Llama against transformers: in eager torch, on ONNX Runtime, and built in TensorRT-RTX."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import CONTEXT_LENGTH, GRAPHS, past_key, past_value
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.targets.tensorrt_graph import lower_for_tensorrt
from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids, Session

# float32 sums in another order, on logits of up to 8.
TOLERANCE = 1e-4
# Of means over 12 000 logits; norms and softmax round at other places.
HALF_PRECISION_MARGIN = 1.1
LENGTH = 64
# Large enough to matter.
EPSILON = 0.03
# The window of sliding layers, and the length up to which scaled ropes were trained: both are crossed.
WINDOW, TRAINED = 5, 16

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
}
SIX_BY_TWO = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
THREE_BY_ONE = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}

# One checkpoint of each family, with everything that the family has and Llama has not.
FAMILIES: dict[str, dict[str, Any]] = {
    "cohere": {
        **SIX_BY_TWO,
        "logit_scale": 0.3,
        "layer_norm_eps": EPSILON,
        "attention_bias": True,
        "rope_parameters": DEFAULT,
        "tie_word_embeddings": True,
    },
    "mistral": {**SIX_BY_TWO, "sliding_window": WINDOW, "rope_parameters": DEFAULT},
    "qwen2": {
        **THREE_BY_ONE,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "rope_parameters": DEFAULT,
        "tie_word_embeddings": True,
    },
    "qwen3": {**SIX_BY_TWO, "rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "gemma": {**THREE_BY_ONE, "rope_parameters": DEFAULT, "tie_word_embeddings": True},
    "gemma2": {
        **SIX_BY_TWO,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
        "rope_parameters": DEFAULT,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **THREE_BY_ONE,
        "hidden_size": 21,
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "tie_word_embeddings": True,
    },
    "smollm3": {
        **SIX_BY_TWO,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "rope_parameters": DEFAULT,
        "tie_word_embeddings": True,
    },
    "granite": {
        **SIX_BY_TWO,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.22,
        "logits_scaling": 1.7,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED},
    },
    "olmo2": {**SIX_BY_TWO, "rope_parameters": DEFAULT},
    "phi3": {
        **THREE_BY_ONE,
        # Its class sizes the factors of longrope by hidden / heads.
        "hidden_size": 48,
        "head_dim": 16,
        "sliding_window": 2 * TRAINED,
        "original_max_position_embeddings": TRAINED,
        "rope_parameters": {**LONGROPE, "rope_theta": 10000.0},
    },
}
# Prompts in chunks, then one token at a time.
SPLITS = {
    "prefill alone": [LENGTH],
    "decode alone": [1] * LENGTH,
    "short prompt": [3] + [1] * (LENGTH - 3),
    "prompt longer than window and trained length": [17] + [1] * (LENGTH - 17),
    "four chunks": [16, 16, 16, 16],
    "uneven chunks, then decode": [9, 7, 30] + [1] * (LENGTH - 46),
}


@pytest.fixture(params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_family(request.param, tiny_checkpoint)


def tiny_family(model_type: str, tiny_checkpoint: Callable[..., Path]) -> Path:
    epsilon = {} if model_type == "cohere" else {"rms_norm_eps": EPSILON}
    return tiny_checkpoint(model_type, **epsilon, **FAMILIES[model_type])


@functools.cache
def torch_session(checkpoint: Path) -> TorchSession:
    return TorchSession.open(open_checkpoint(checkpoint))


@pytest.fixture(params=["torch", "ort", "kernels"])
def session(
    request: pytest.FixtureRequest,
    checkpoint: Path,
    exported: Callable[..., Bundle],
    ort: Callable[..., OrtSession],
    kernels: Callable[[Bundle], Session],
) -> Session:
    if request.param == "torch":
        return torch_session(checkpoint)
    return (ort if request.param == "ort" else kernels)(exported(checkpoint))


def whole_prompt(sizes: list[int]) -> list[int]:
    """The same steps with the chunks of the prompt as one: what longrope's choice of a table depends on."""
    decoded = len(sizes) - max((index + 1 for index, size in enumerate(sizes) if size > 1), default=1)
    return [sum(sizes) - decoded] + [1] * decoded


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_equals_transformers(
    checkpoint: Path,
    session: Session,
    split: str,
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids = random_ids(2, LENGTH)
    expected = reference_logits(checkpoint, ids, whole_prompt(SPLITS[split]))
    found = teacher_forced(session, ids, SPLITS[split])
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", [[LENGTH], [20] + [1] * (LENGTH - 20)], ids=["prefill", "decode"])
def test_cache_equals_that_of_transformers(
    checkpoint: Path,
    session: Session,
    sizes: list[int],
    random_ids: Callable[..., Ids],
    reference_run: Callable[..., tuple[Floats, DynamicCache]],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids, cache = random_ids(2, LENGTH), session.allocate_cache(2)
    teacher_forced(session, ids, sizes, cache)
    _, expected = reference_run(checkpoint, ids, sizes)
    for layer in range(session.contract.num_layers):
        stored = expected.layers[layer]
        for name, array in ((past_key(layer), stored.keys), (past_value(layer), stored.values)):
            np.testing.assert_allclose(cache.read(name)[:, :, :LENGTH], array, atol=TOLERANCE, rtol=0)


def test_rows_of_unequal_length_equal_runs_of_their_own(
    checkpoint: Path,
    session: Session,
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    ragged: Callable[..., Floats],
) -> None:
    lengths, ids = [1, WINDOW, TRAINED - 1, 40], random_ids(4, LENGTH)
    found = ragged(session, ids, lengths, 6)
    for row, length in enumerate(lengths):
        alone = reference_logits(checkpoint, ids[row : row + 1, : length + 6], [length] + [1] * 6)
        np.testing.assert_allclose(found[row], alone[0, length - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_errs_no_more_than_that_of_transformers(
    checkpoint: Path,
    dtype: str,
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids = random_ids(2, LENGTH)
    exact = reference_logits(checkpoint, ids)
    theirs = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    with torch.inference_mode():
        theirs_off = np.abs(theirs(torch.from_numpy(ids)).logits.float().numpy() - exact).mean()
    session = TorchSession.open(open_checkpoint(checkpoint), dtype)
    off = np.abs(teacher_forced(session, ids, [LENGTH]) - exact).mean()
    assert 0 < off < HALF_PRECISION_MARGIN * theirs_off


def test_graphs_hold_standard_operators_of_opset_24(
    checkpoint: Path, exported: Callable[..., Bundle]
) -> None:
    for graph in GRAPHS:
        path = exported(checkpoint).graph_path(graph)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 24)}
        assert {node.domain for node in model.graph.node} == {""}
        assert not {"If", "Loop"} & {node.op_type for node in model.graph.node}


def test_capped_attention_neither_repeats_nor_tiles_keys(
    tiny_checkpoint: Callable[..., Path], exported: Callable[..., Bundle]
) -> None:
    bundle = exported(tiny_family("gemma2", tiny_checkpoint))
    model = onnx.load(bundle.graph_path("decode"), load_external_data=False)
    operators = [node.op_type for node in model.graph.node]
    assert {"Tanh", "Where", "Softmax"} <= set(operators)
    assert not {"Attention", "Expand", "Tile", "Concat"} & set(operators)
    # The only shape that anything asks for is the capacity.
    assert operators.count("Shape") == 1


def test_graph_for_tensorrt_computes_the_same_over_the_context_in_use(
    checkpoint: Path, exported: Callable[..., Bundle], random_ids: Callable[..., Ids], tmp_path: Path
) -> None:
    bundle, capacity, past = exported(checkpoint), 48, np.array([20, 11])
    lowered = lower_for_tensorrt(bundle.graph_path("prefill"), "prefill", bundle.contract, capacity)
    (tmp_path / "lowered.onnx").write_bytes(lowered.model)
    shutil.copy(bundle.path / "weights.safetensors", tmp_path)
    random = np.random.default_rng(0)
    feeds = {"input_ids": random_ids(2, 3), "past_length": past, "logit_positions": np.array([[2], [0]])}
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


@pytest.mark.slow
def test_float16_graphs_build_in_tensorrt_rtx(checkpoint: Path, exported: Callable[..., Bundle]) -> None:
    bundle = exported(checkpoint, dtype="float16")
    options = TensorRTOptions(max_batch=2, compute_capabilities=(89,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (89,)
