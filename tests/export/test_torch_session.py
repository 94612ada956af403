"""The eager reference against transformers: every variation of a Llama, which costs no trace here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgraph.export.contract import past_key
from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.session import Floats, Ids

# float32 sums in another order, on logits of up to 5.
TOLERANCE = 1e-4
# bfloat16 keeps 8 bits of every product's result; transformers rounds at other places (norm weights, rotary, softmax).
BFLOAT16_TOLERANCE = 0.35

LENGTH = 24
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIATIONS: dict[str, dict[str, Any]] = {
    "head_dim is not hidden / heads": {},
    "head_dim is hidden / heads": {"hidden_size": 32},
    "one key/value head": {"num_key_value_heads": 1},
    "as many key/value heads as heads": {"num_key_value_heads": 4},
    "2 key/value heads of 8": {"hidden_size": 24, "num_attention_heads": 8},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "attention biases": {"attention_bias": True},
    "feed-forward biases": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one layer": {"num_hidden_layers": 1},
    "gelu": {"hidden_act": "gelu"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
    "large epsilon": {"rms_norm_eps": 0.1},
    "large theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    "dynamic rope": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "llama3 rope": {
        "rope_parameters": {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    },
}


def open_session(checkpoint: Path, dtype: str = "float32", residual_dtype: str | None = None) -> TorchSession:
    return TorchSession.open(open_checkpoint(checkpoint), dtype, residual_dtype)


@pytest.mark.parametrize("variation", VARIATIONS)
def test_logits_equal_transformers(
    variation: str,
    tiny_llama: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    checkpoint, ids, sizes = tiny_llama(**VARIATIONS[variation]), random_ids(2, LENGTH), [20, 1, 1, 1, 1]
    expected = reference_logits(checkpoint, ids, sizes)
    found = teacher_forced(open_session(checkpoint), ids, sizes)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_hidden_states_equal_transformers(
    tiny_llama: Callable[..., Path], random_ids: Callable[..., Ids], reference: Callable[[Path], Any]
) -> None:
    checkpoint, ids = tiny_llama(), random_ids(2, LENGTH)
    session, model = open_session(checkpoint), reference(checkpoint)
    session.prefill(session.allocate_cache(2), ids, np.zeros(2, np.int64), np.zeros((2, 1), np.int64))
    found = session.hidden_states()
    # The last of transformers is behind the final norm.
    expected = model(torch.from_numpy(ids), output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == session.contract.num_layers + 1
    for ours, theirs in zip(found[:-1], expected[:-1], strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=TOLERANCE, rtol=0)
    last = model.model.norm(torch.from_numpy(found[-1])).numpy()
    np.testing.assert_allclose(last, expected[-1].numpy(), atol=TOLERANCE, rtol=0)


def test_bfloat16_follows_transformers_in_bfloat16(
    tiny_llama: Callable[..., Path], random_ids: Callable[..., Ids], teacher_forced: Callable[..., Floats]
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint, ids = tiny_llama(), random_ids(1, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.float().numpy()
    found = teacher_forced(open_session(checkpoint, "bfloat16"), ids, [LENGTH])
    assert np.abs(found - expected).max() < BFLOAT16_TOLERANCE
    assert np.abs(found - expected).max() > TOLERANCE


def test_float32_residual_brings_half_precision_closer_to_float32(
    tiny_llama: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    checkpoint, ids = tiny_llama(num_hidden_layers=6), random_ids(2, LENGTH)
    expected = reference_logits(checkpoint, ids)
    errors = [
        np.abs(
            teacher_forced(open_session(checkpoint, "bfloat16", residual), ids, [LENGTH]) - expected
        ).mean()
        for residual in ("bfloat16", "float32")
    ]
    assert errors[1] < errors[0]


def test_cache_holds_what_was_written_and_is_zero_after_reset(
    tiny_llama: Callable[..., Path], random_ids: Callable[..., Ids]
) -> None:
    session, ids = open_session(tiny_llama()), random_ids(1, 5)
    cache = session.allocate_cache(1, 8)
    session.prefill(cache, ids, np.zeros(1, np.int64), np.zeros((1, 1), np.int64))
    written = cache.read(past_key(0))
    assert written[:, :, :5].all()
    assert not written[:, :, 5:].any()
    cache.reset()
    assert not cache.read(past_key(0)).any()
    assert written.any()


def test_step_past_the_end_of_the_cache_is_refused(
    tiny_llama: Callable[..., Path], random_ids: Callable[..., Ids]
) -> None:
    session = open_session(tiny_llama())
    cache = session.allocate_cache(1, 8)
    with pytest.raises(ValueError, match="row 0 has 8 tokens in the cache and 1 more"):
        session.decode(cache, random_ids(1, 1), np.array([8]))


@pytest.mark.parametrize(("batch_size", "limit"), [(0, 8), (1, 0), (1, 65)])
def test_cache_of_an_impossible_size_is_refused(
    tiny_llama: Callable[..., Path], batch_size: int, limit: int
) -> None:
    with pytest.raises(ValueError, match="1 to 64 positions"):
        open_session(tiny_llama()).allocate_cache(batch_size, limit)


def test_cache_of_another_session_is_refused(
    tiny_llama: Callable[..., Path], random_ids: Callable[..., Ids]
) -> None:
    class Other:
        batch_size = limit = 8

    with pytest.raises(TypeError, match="cache is a Other"):
        open_session(tiny_llama()).decode(Other(), random_ids(8, 1), np.zeros(8, np.int64))


def test_hidden_states_before_the_first_step_are_an_error(tiny_llama: Callable[..., Path]) -> None:
    with pytest.raises(RuntimeError, match="no step has been run yet"):
        open_session(tiny_llama()).hidden_states()


def test_info_names_torch_and_the_dtype(tiny_llama: Callable[..., Path]) -> None:
    info = open_session(tiny_llama(), "bfloat16").info
    assert (info.runtime, info.version, info.device, info.dtype) == (
        "torch",
        torch.__version__,
        "cpu",
        "bfloat16",
    )
