"""The two graphs on ONNX Runtime against transformers, at every position of a text, however it is cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import past_key, past_value
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

# float32 sums in another order, on logits of up to 22.
TOLERANCE = 1e-4
LENGTH = 32
TRAINED = 16

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Small models that differ from the first (head_dim 8 where hidden / heads is 5, 2 key/value heads of 4, separate head,
# default rope) in the ways that graphs can go wrong.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama3 rope, one key/value head, biases": {
        "rope_parameters": {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED},
        "num_key_value_heads": 1,
        "attention_bias": True,
        "mlp_bias": True,
    },
    # Heads, layers and feed-forward width are the numbers that the tracer puts in for S, B and T.
    "linear rope, as many key/value heads as heads, tied": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "num_hidden_layers": 3,
        "intermediate_size": 37,
        "tie_word_embeddings": True,
    },
    "dynamic rope, 2 key/value heads of 8": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": TRAINED,
        "hidden_size": 24,
        "num_attention_heads": 8,
    },
}

Logits = Callable[..., Floats]


@pytest.fixture(params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tiny_llama: Callable[..., Path]) -> Path:
    return tiny_llama(**MODELS[request.param])


@pytest.fixture
def session(checkpoint: Path, exported: Callable[..., Bundle], ort: Callable[..., OrtSession]) -> OrtSession:
    return ort(exported(checkpoint))


@pytest.fixture
def plain(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle], ort: Callable[..., OrtSession]
) -> OrtSession:
    return ort(exported(tiny_llama()))


@pytest.fixture
def stories(shared_data: Path, exported: Callable[..., Bundle], ort: Callable[..., OrtSession]) -> OrtSession:
    return ort(exported(shared_data / "stories260k"))


@pytest.mark.parametrize("prefilled", range(1, LENGTH))
def test_prefill_and_decode_equal_transformers_for_every_split(
    checkpoint: Path,
    session: OrtSession,
    prefilled: int,
    random_ids: Callable[..., Ids],
    reference_logits: Logits,
    teacher_forced: Logits,
) -> None:
    ids = random_ids(1, LENGTH)
    sizes = [prefilled] + [1] * (LENGTH - prefilled)
    # Frequencies of dynamic rope depend on the split, so transformers makes the same steps.
    split = sizes if session.contract.takes_new_length else None
    expected = reference_logits(checkpoint, ids, split)
    np.testing.assert_allclose(teacher_forced(session, ids, sizes), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", [[16, 16], [5, 5, 5, 5, 5, 5, 2], [1, 31], [30, 2], [2, 7, 3, 20]], ids=str)
def test_chunked_prefill_equals_transformers(
    checkpoint: Path,
    session: OrtSession,
    sizes: list[int],
    random_ids: Callable[..., Ids],
    reference_logits: Logits,
    teacher_forced: Logits,
) -> None:
    ids = random_ids(1, LENGTH)
    expected = reference_logits(checkpoint, ids)
    np.testing.assert_allclose(teacher_forced(session, ids, sizes), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("position", [1, 15, 16, 17, 63])
def test_rope_is_right_on_both_sides_of_the_trained_length(
    checkpoint: Path,
    session: OrtSession,
    position: int,
    random_ids: Callable[..., Ids],
    reference_logits: Logits,
    teacher_forced: Logits,
) -> None:
    ids = random_ids(1, position + 1)
    for sizes in ([position + 1], [position, 1]):
        expected = reference_logits(checkpoint, ids, sizes)
        np.testing.assert_allclose(teacher_forced(session, ids, sizes), expected, atol=TOLERANCE, rtol=0)


def test_cache_equals_that_of_transformers(
    checkpoint: Path,
    session: OrtSession,
    random_ids: Callable[..., Ids],
    reference: Callable[[Path], PreTrainedModel],
    teacher_forced: Logits,
) -> None:
    ids, cache = random_ids(2, 12), session.allocate_cache(2)
    teacher_forced(session, ids, [12], cache)
    expected = reference(checkpoint)(torch.from_numpy(ids)).past_key_values
    for layer in range(session.contract.num_layers):
        keys, values = expected.layers[layer].keys.numpy(), expected.layers[layer].values.numpy()
        for name, array in ((past_key(layer), keys), (past_value(layer), values)):
            np.testing.assert_allclose(cache.read(name)[:, :, :12], array, atol=TOLERANCE, rtol=0)
            assert not cache.read(name)[:, :, 12:].any()


@pytest.mark.parametrize("past", [0, 1, 5])
@pytest.mark.parametrize("new", [1, 2, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_graphs_take_every_size_of_their_symbolic_dimensions(
    checkpoint: Path,
    session: OrtSession,
    batch_size: int,
    new: int,
    past: int,
    random_ids: Callable[..., Ids],
    reference_logits: Logits,
) -> None:
    ids = random_ids(batch_size, past + new)
    expected = reference_logits(checkpoint, ids)
    cache, rows = session.allocate_cache(batch_size), np.zeros((batch_size, 1), np.int64)
    zeros = np.zeros(batch_size, np.int64)
    if past:
        session.prefill(cache, ids[:, :past], zeros, rows, zeros + past + new)
    # All rows of the new tokens, twice, the last first: N is neither 1 nor S.
    positions = np.tile(np.repeat(np.arange(new)[::-1], 2), (batch_size, 1))
    found = session.prefill(cache, ids[:, past:], zeros + past, positions)
    np.testing.assert_allclose(found, expected[:, past:][:, positions[0]], atol=TOLERANCE, rtol=0)
    if new == 1 and past:
        found = session.decode(cache, ids[:, past:], zeros + past)
        np.testing.assert_allclose(found, expected[:, past:], atol=TOLERANCE, rtol=0)


def test_tied_weight_is_stored_once(tiny_llama: Callable[..., Path], exported: Callable[..., Bundle]) -> None:
    (tied,) = (model for model in MODELS.values() if model.get("tie_word_embeddings"))
    bundle = exported(tiny_llama(**tied))
    stored = load_file(bundle.path / "weights.safetensors")
    assert [name for name, tensor in stored.items() if tensor.shape == (97, 20)] == [
        "model.embed_tokens.weight"
    ]
    decode = onnx.load(bundle.graph_path("decode"), load_external_data=False).graph
    readers = [node.op_type for node in decode.node if "model.embed_tokens.weight" in node.input]
    assert sorted(readers) == ["Gather", "Gemm"]


def test_rows_of_unequal_length_equal_runs_of_their_own(
    checkpoint: Path,
    session: OrtSession,
    random_ids: Callable[..., Ids],
    reference_logits: Logits,
    teacher_forced: Logits,
) -> None:
    unequal_rows(session, checkpoint, [1, 3, 5, 33], random_ids(4, 40), reference_logits)


def test_rows_of_a_real_model_of_lengths_1_7_64_equal_runs_of_their_own(
    stories: OrtSession, shared_data: Path, random_ids: Callable[..., Ids], reference_logits: Logits
) -> None:
    ids = random_ids(3, 70, stories.contract.vocab_size)
    unequal_rows(stories, shared_data / "stories260k", [1, 7, 64], ids, reference_logits)


def unequal_rows(
    session: OrtSession, checkpoint: Path, lengths: Sequence[int], ids: Ids, reference_logits: Logits
) -> None:
    """Prefill rows of `lengths` padded to the longest, then decode a few tokens; each row must be as if alone."""
    past, longest = np.array(lengths), max(lengths)
    cache = session.allocate_cache(len(lengths), longest + 8)
    padded = np.where(np.arange(longest) < past[:, None], ids[:, :longest], 0)
    steps = [session.prefill(cache, padded, np.zeros_like(past), past[:, None] - 1, past)]
    for step in range(4):
        chosen = np.take_along_axis(ids, (past + step)[:, None], 1)
        steps.append(session.decode(cache, chosen, past + step).copy())
    found = np.concatenate(steps, axis=1)
    for row, length in enumerate(lengths):
        alone = reference_logits(checkpoint, ids[row : row + 1, : length + 4], [length, 1, 1, 1, 1])
        np.testing.assert_allclose(found[row], alone[0, length - 1 :], atol=TOLERANCE, rtol=0)


def test_logits_do_not_depend_on_what_a_row_is_padded_with(
    plain: OrtSession, random_ids: Callable[..., Ids]
) -> None:
    ids, results = random_ids(2, 9), []
    for pad in (0, 50):
        cache, padded = plain.allocate_cache(2), ids.copy()
        padded[0, 4:] = pad
        plain.prefill(cache, padded, np.zeros(2, np.int64), np.array([[3], [8]]))
        results.append(plain.decode(cache, ids[:, :1], np.array([4, 9])).copy())
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize(
    "sizes",
    [
        [400],
        [1] * 400,
        [63, *[1] * 337],
        [64, *[1] * 336],
        [65, *[1] * 335],
        [128, *[1] * 272],
        [399, 1],
        [100] * 4,
        [7] * 57 + [1],
        [33, 200, 1, 1, 64, *[1] * 101],
    ],
    ids=lambda sizes: f"{sizes[0]} then {len(sizes) - 1} more",
)
def test_real_model_equals_transformers_at_400_positions(
    stories: OrtSession,
    shared_data: Path,
    sizes: list[int],
    random_ids: Callable[..., Ids],
    reference_logits: Logits,
    teacher_forced: Logits,
) -> None:
    text = (shared_data / "text" / "tinystories_sample_en.txt").read_text(encoding="utf-8")
    tokenizer = tokenizers.Tokenizer.from_file(str(shared_data / "stories260k" / "tokenizer.json"))
    ids = np.array([tokenizer.encode(text).ids[:400]])
    expected = reference_logits(shared_data / "stories260k", ids)
    np.testing.assert_allclose(teacher_forced(stories, ids, sizes), expected, atol=TOLERANCE, rtol=0)
