"""Decoders with layer norms against transformers: in eager torch, on ONNX Runtime, and built in TensorRT-RTX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, past_key, past_value
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids, Session

# float32 sums in another order, on logits of up to 12.
TOLERANCE = 1e-4
# float16 keeps 11 bits of every product's result.
FLOAT16_TOLERANCE = 0.1
LENGTH, VOCABULARY, WINDOW = 64, 97, 9


class Case(NamedTuple):
    """A tiny checkpoint: its family and config, and whether it is also exported, which takes seconds."""

    model_type: str
    config: dict[str, Any]
    exported: bool = False


# Heads are no power of two; two key/value heads or one where the family can; a window shorter than the sequence; an
# epsilon that is large enough to matter.
EPSILON = 0.03
SIX_BY_TEN = {"hidden_size": 60, "num_attention_heads": 6, "num_hidden_layers": 2}
NEOX = {
    **SIX_BY_TEN,
    "intermediate_size": 44,
    "max_position_embeddings": LENGTH,
    "rotary_pct": 0.4,
    "layer_norm_eps": EPSILON,
}
PHI = {
    **SIX_BY_TEN,
    "intermediate_size": 44,
    "max_position_embeddings": LENGTH,
    "partial_rotary_factor": 0.4,
    "layer_norm_eps": EPSILON,
}
STARCODER2 = {
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
    "norm_epsilon": EPSILON,
}
FALCON = {**SIX_BY_TEN, "max_position_embeddings": LENGTH, "layer_norm_epsilon": EPSILON}
GPT2 = {"n_embd": 30, "n_head": 3, "n_layer": 3, "n_positions": LENGTH, "layer_norm_epsilon": EPSILON}
BLOOM = {"hidden_size": 60, "n_head": 6, "n_layer": 2, "layer_norm_epsilon": EPSILON}
MPT = {"n_heads": 6, "n_layers": 2, "max_seq_len": LENGTH, "layer_norm_epsilon": EPSILON}
LINEAR_ROPE = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0, "partial_rotary_factor": 0.6}
CASES = {
    "gpt2": Case("gpt2", GPT2, exported=True),
    "gpt2, separate head, scores by layer": Case(
        "gpt2",
        {
            **GPT2,
            "n_inner": 44,
            "activation_function": "relu",
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
        },
        exported=True,
    ),
    "gpt2, scores as they are": Case("gpt2", {**GPT2, "scale_attn_weights": False}),
    "gpt_neox": Case("gpt_neox", NEOX, exported=True),
    "gpt_neox, sequential, tied, no attention bias": Case(
        "gpt_neox",
        {**NEOX, "use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False},
    ),
    "gpt_neox, linear rope": Case("gpt_neox", {**NEOX, "rope_parameters": LINEAR_ROPE}),
    "phi": Case("phi", {**PHI, "num_key_value_heads": 2}, exported=True),
    "phi, normed heads": Case("phi", {**PHI, "num_key_value_heads": 1, "qk_layernorm": True}, exported=True),
    "starcoder2": Case("starcoder2", {**STARCODER2, "sliding_window": WINDOW}, exported=True),
    "starcoder2, one key/value head, no bias, separate head": Case(
        "starcoder2",
        {**STARCODER2, "num_key_value_heads": 1, "use_bias": False, "tie_word_embeddings": False},
    ),
    "falcon, one key/value head": Case("falcon", FALCON, exported=True),
    "falcon, new decoder": Case(
        "falcon",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 44},
        exported=True,
    ),
    "falcon, new decoder with one norm": Case(
        "falcon",
        {
            **FALCON,
            "num_kv_heads": 3,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "falcon, ALiBi": Case(
        "falcon",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        exported=True,
    ),
    "falcon, ALiBi over one key/value head": Case("falcon", {**FALCON, "alibi": True}),
    "bloom": Case("bloom", BLOOM, exported=True),
    "mpt": Case("mpt", {**MPT, "d_model": 60}, exported=True),
    "mpt, clipped": Case(
        "mpt",
        {
            **MPT,
            "d_model": 30,
            "tie_word_embeddings": False,
            "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.7},
        },
    ),
}
EXPORTED = [name for name, case in CASES.items() if case.exported]
# Prompts in chunks, then one token at a time.
SPLITS = {
    "prefill alone": [LENGTH],
    "decode alone": [1] * LENGTH,
    "prompt shorter than the window": [3] + [1] * (LENGTH - 3),
    "prompt longer than the window": [17] + [1] * (LENGTH - 17),
    "four chunks": [16, 16, 16, 16],
    "uneven chunks, then decode": [9, 7, 30] + [1] * (LENGTH - 46),
}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a case, with weights large enough for every part to matter."""

    @functools.cache
    def make(name: str) -> Path:
        torch.manual_seed(7)
        # Some families end texts with a token that a vocabulary of this size does not have.
        common = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
        config = AutoConfig.for_model(CASES[name].model_type, **common, **CASES[name].config)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            # Norm weights and biases, which transformers leaves at one and zero.
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        path = tmp_path_factory.mktemp(CASES[name].model_type)
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture
def checkpoint(name: str, make_checkpoint: Callable[[str], Path]) -> Path:
    return make_checkpoint(name)


@functools.cache
def reference(checkpoint: Path) -> PreTrainedModel:
    # Eagerly, transformers 5.24 adds Falcon's ALiBi bias twice; "sdpa" is what it takes for that family by itself.
    falcon = open_checkpoint(checkpoint).config.model_type == "falcon"
    attention = "sdpa" if falcon else "eager"
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation=attention
    )
    return model.eval().requires_grad_(False)


@functools.cache
def torch_session(checkpoint: Path) -> TorchSession:
    return TorchSession.open(open_checkpoint(checkpoint))


@pytest.fixture
def session(
    name: str,
    runtime: str,
    checkpoint: Path,
    exported: Callable[..., Bundle],
    ort: Callable[..., OrtSession],
    kernels: Callable[[Bundle], Session],
) -> Session:
    if runtime == "torch":
        return torch_session(checkpoint)
    return (ort if runtime == "ort" else kernels)(exported(checkpoint))


RUNTIMES = [
    pytest.param(name, runtime, id=f"{name}-{runtime}")
    for name, case in CASES.items()
    for runtime in (("torch", "ort", "kernels") if case.exported else ("torch",))
]


def expected_logits(checkpoint: Path, ids: Ids) -> Floats:
    result: Floats = reference(checkpoint)(torch.from_numpy(ids)).logits.numpy()
    return result


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "runtime"), RUNTIMES)
def test_every_split_equals_transformers(
    checkpoint: Path,
    session: Session,
    split: str,
    random_ids: Callable[..., Ids],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids = random_ids(2, LENGTH)
    found = teacher_forced(session, ids, SPLITS[split], session.allocate_cache(2, LENGTH))
    np.testing.assert_allclose(found, expected_logits(checkpoint, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", [[LENGTH], [20] + [1] * (LENGTH - 20)], ids=["prefill", "decode"])
@pytest.mark.parametrize(("name", "runtime"), RUNTIMES)
def test_cache_equals_that_of_transformers(
    checkpoint: Path,
    session: Session,
    sizes: Sequence[int],
    random_ids: Callable[..., Ids],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids, cache = random_ids(2, LENGTH), session.allocate_cache(2, LENGTH)
    teacher_forced(session, ids, sizes, cache)
    expected = reference(checkpoint)(torch.from_numpy(ids), use_cache=True).past_key_values
    for layer in range(session.contract.num_layers):
        stored = expected.layers[layer]
        for cached, array in ((past_key(layer), stored.keys), (past_value(layer), stored.values)):
            # transformers keeps the last tokens of a window alone, and Falcon's keys once for each head.
            found = cache.read(cached)[:, :, LENGTH - array.shape[2] : LENGTH]
            found = np.repeat(found, array.shape[1] // found.shape[1], axis=1)
            np.testing.assert_allclose(found, array, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "runtime"), RUNTIMES)
def test_rows_of_unequal_length_equal_runs_of_their_own(
    checkpoint: Path, session: Session, random_ids: Callable[..., Ids], ragged: Callable[..., Floats]
) -> None:
    lengths, ids = [1, WINDOW, 3, 40], random_ids(4, LENGTH)
    found = ragged(session, ids, lengths, 6)
    for row, length in enumerate(lengths):
        alone = expected_logits(checkpoint, ids[row : row + 1, : length + 6])
        np.testing.assert_allclose(found[row], alone[0, length - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("residual_dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_float16_stays_near_float32(
    checkpoint: Path,
    residual_dtype: str,
    random_ids: Callable[..., Ids],
    teacher_forced: Callable[..., Floats],
) -> None:
    session = TorchSession.open(open_checkpoint(checkpoint), "float16", residual_dtype)
    ids = random_ids(2, LENGTH)
    found = teacher_forced(session, ids, [20, LENGTH - 20], session.allocate_cache(2, LENGTH))
    np.testing.assert_allclose(found, expected_logits(checkpoint, ids), atol=FLOAT16_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", EXPORTED)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_float16_graphs_stay_near_float32_and_build_in_tensorrt_rtx(
    checkpoint: Path,
    exported: Callable[..., Bundle],
    ort: Callable[..., OrtSession],
    random_ids: Callable[..., Ids],
    teacher_forced: Callable[..., Floats],
) -> None:
    bundle, ids = exported(checkpoint, dtype="float16"), random_ids(2, LENGTH)
    found = teacher_forced(ort(bundle), ids, [20] + [1] * (LENGTH - 20))
    np.testing.assert_allclose(found, expected_logits(checkpoint, ids), atol=FLOAT16_TOLERANCE, rtol=0)
    options = TensorRTOptions(max_batch=2, max_context=LENGTH, compute_capabilities=(89,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (89,)
