from __future__ import annotations

from dataclasses import replace

import pytest

from kvgraph.export.contract import (
    CONTEXT_LENGTH,
    Contract,
    EncoderContract,
    TensorSpec,
    cross_tensors,
    scatter_state,
)
from kvgraph.export.targets.profiles import choose_limits, profile_shapes
from kvgraph.export.targets.tensorrt_graph import bound_contract
from kvgraph.runtime.target import Limits


def contract(max_positions: int = 64, capacity: int | None = None) -> Contract:
    return Contract(97, 1, max_positions, False, scatter_state([(2, 8)], "float16", capacity))


def test_default_limits_are_those_of_the_model() -> None:
    assert choose_limits(contract(), None, None, None) == Limits(1, 64, 64)


def test_default_limits_of_a_long_context_are_bounded() -> None:
    assert choose_limits(contract(131072), None, None, None) == Limits(1, 4096, 512)


def test_a_capacity_in_the_graphs_is_the_context() -> None:
    assert choose_limits(contract(capacity=32), 4, None, 8) == Limits(4, 32, 8)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((0, None, None), "--max-batch is 0, expected 1 or more"),
        ((None, 65, None), "--max-context is 65, expected 2 to 64"),
        ((None, 1, None), "--max-context is 1, expected 2 to 64"),
        ((None, 0, None), "--max-context is 0, expected 2 to 64"),
        ((None, 32, 33), "--prefill-chunk is 33, expected 1 to 32"),
        ((None, None, 0), "--prefill-chunk is 0, expected 1 to 64"),
    ],
)
def test_limits_out_of_range_are_refused(
    asked: tuple[int | None, int | None, int | None], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        choose_limits(contract(), *asked)


def test_a_context_other_than_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-context is 16, the bundle has a capacity of 32 written in"):
        choose_limits(contract(capacity=32), None, 16, None)


def test_profiles_differ_in_new_tokens_and_rows_of_logits() -> None:
    limits = Limits(max_batch=4, max_context=32, prefill_chunk=8)
    inputs = bound_contract(contract(), 32).graph("prefill").inputs
    inputs = (*inputs, TensorSpec(CONTEXT_LENGTH, "int64", (1,)))
    prefill, decode = (profile_shapes(inputs, runs, limits) for runs in ("prefill", "decode"))
    assert prefill["input_ids"] == ((1, 1), (4, 8), (4, 8))
    assert decode["input_ids"] == ((1, 1), (4, 1), (4, 1))
    assert prefill["logit_positions"] == ((1, 1), (4, 1), (4, 8))
    assert decode["logit_positions"] == ((1, 1), (4, 1), (4, 1))
    for profile in (prefill, decode):
        assert profile["past_key_values.0.key"] == ((1, 2, 32, 8), (4, 2, 32, 8), (4, 2, 32, 8))
        assert profile[CONTEXT_LENGTH] == ((1,), (32,), (32,))


def with_encoder(max_source_positions: int) -> Contract:
    encoder = EncoderContract(61, max_source_positions, cross_tensors([(3, 8)], "float16"))
    return replace(contract(), encoder=encoder)


def test_sources_have_a_limit_of_their_own() -> None:
    assert choose_limits(with_encoder(48), None, None, None).max_source == 48
    assert choose_limits(with_encoder(4096), None, None, None).max_source == 512
    assert choose_limits(with_encoder(48), None, None, None, 16).max_source == 16
    assert choose_limits(contract(), None, None, None).max_source is None


@pytest.mark.parametrize("asked", [1, 49])
def test_a_source_out_of_range_is_refused(asked: int) -> None:
    with pytest.raises(ValueError, match=f"--max-source is {asked}, expected 2 to 48"):
        choose_limits(with_encoder(48), None, None, None, asked)


def test_a_limit_of_sources_without_an_encoder_is_refused() -> None:
    with pytest.raises(ValueError, match="--max-source is 16, the model has no encoder"):
        choose_limits(contract(), None, None, None, 16)


def test_every_graph_takes_sources_up_to_the_limit() -> None:
    limits = Limits(max_batch=4, max_context=32, prefill_chunk=8, max_source=16)
    bound = bound_contract(with_encoder(48), 32)
    encode = profile_shapes(bound.graph("encode").inputs, "encode", limits)
    assert encode == {
        "input_ids": ((1, 1), (4, 16), (4, 16)),
        "encoder_length": ((1,), (4,), (4,)),
    }
    decode = profile_shapes(bound.graph("decode").inputs, "decode", limits)
    assert decode["cross.0.key"] == ((1, 3, 1, 8), (4, 3, 16, 8), (4, 3, 16, 8))
    assert decode["encoder_length"] == ((1,), (4,), (4,))
