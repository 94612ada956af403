"""Mixtures of experts against transformers: in eager torch, on ONNX Runtime, and built in TensorRT-RTX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from transformers import DynamicCache

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, past_key, past_value
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids, Session

# float32 sums in another order, on logits of up to 8. The scores of the last expert chosen and of the first one left
# out are never as close as that here: the choice is the same.
TOLERANCE = 1e-4
LENGTH = 64
WINDOW = 5
EPSILON = 0.03
# The grouped product that transformers uses takes rows of whole 16 bytes.
EXPERT_SIZE = 12

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
SIX_BY_TWO = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
THREE_BY_ONE = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}

# A checkpoint for every way to choose and to weight experts, by name: model type and config.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "mixtral",
        {
            **SIX_BY_TWO,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "rope_parameters": DEFAULT,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **SIX_BY_TWO,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": EXPERT_SIZE,
            "norm_topk_prob": True,
            "attention_bias": True,
            "rope_parameters": YARN,
        },
    ),
    "qwen3_moe, few of many, raw weights, some layers without, window": (
        "qwen3_moe",
        {
            **THREE_BY_ONE,
            "num_hidden_layers": 5,
            "num_experts": 17,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": EXPERT_SIZE,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "rope_parameters": DEFAULT,
        },
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {
            **THREE_BY_ONE,
            "num_experts": 6,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": EXPERT_SIZE,
            "shared_expert_intermediate_size": 11,
            "norm_topk_prob": False,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": DEFAULT,
            "tie_word_embeddings": True,
        },
    ),
}
# Prompts in chunks, then one token at a time.
SPLITS = {
    "prefill alone": [LENGTH],
    "decode alone": [1] * LENGTH,
    "short prompt": [3] + [1] * (LENGTH - 3),
    "four chunks": [16, 16, 16, 16],
    "uneven chunks, then decode": [9, 7, 30] + [1] * (LENGTH - 46),
}


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]) -> Path:
    model_type, config = CHECKPOINTS[request.param]
    return tiny_checkpoint(model_type, rms_norm_eps=EPSILON, **config)


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
    found = teacher_forced(session, ids, SPLITS[split])
    np.testing.assert_allclose(found, reference_logits(checkpoint, ids), atol=TOLERANCE, rtol=0)


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
    lengths, ids = [1, WINDOW, 15, 40], random_ids(4, LENGTH)
    found = ragged(session, ids, lengths, 6)
    for row, length in enumerate(lengths):
        alone = reference_logits(checkpoint, ids[row : row + 1, : length + 6], [length] + [1] * 6)
        np.testing.assert_allclose(found[row], alone[0, length - 1 :], atol=TOLERANCE, rtol=0)


def test_graphs_hold_standard_operators_of_opset_24(
    checkpoint: Path, exported: Callable[..., Bundle]
) -> None:
    for graph in GRAPHS:
        path = exported(checkpoint).graph_path(graph)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 24)}
        assert {node.domain for node in model.graph.node} == {""}
        # Nor any whose output has a shape that depends on values.
        assert not {"If", "Loop", "NonZero", "Compress"} & {node.op_type for node in model.graph.node}


def consumers(path: Path) -> dict[str, set[str]]:
    """What kinds of operators read each parameter of experts."""
    model = onnx.load(path, load_external_data=False)
    read: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            if ".experts." in name:
                read.setdefault(name, set()).add(node.op_type)
    return read


def test_decode_gathers_the_weights_of_chosen_experts_alone(
    checkpoint: Path, exported: Callable[..., Bundle], request: pytest.FixtureRequest
) -> None:
    bundle = exported(checkpoint)
    decode, prefill = (consumers(bundle.graph_path(graph)) for graph in ("decode", "prefill"))
    assert decode.keys() == prefill.keys()
    assert decode
    assert set.union(*decode.values()) == {"Gather"}
    grouped = "few of many" in request.node.callspec.id
    assert set.union(*prefill.values()) == {"Gather" if grouped else "MatMul"}


@pytest.mark.slow
def test_float16_graphs_build_in_tensorrt_rtx(checkpoint: Path, exported: Callable[..., Bundle]) -> None:
    bundle = exported(checkpoint, dtype="float16")
    options = TensorRTOptions(max_batch=2, compute_capabilities=(89,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (89,)
