"""yarn and longrope against the tables of transformers, partial rotation, and which table a row of a batch turns by."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.positions import Rotary, Step
from kvgraph.models.rope import RopeConfig, read_partial_rope
from kvgraph.models.rope_frequencies import inverse_frequencies, longrope_inverse_frequencies

TRAINED, LONGEST = 16, 96
# On both sides of the trained length, and four times as far.
POSITIONS = (0, 1, TRAINED - 1, TRAINED, TRAINED + 1, 4 * TRAINED)
# cos and sin of the same float32 angle.
TABLE_TOLERANCE = 1e-6
FLOAT32_RTOL = 1e-6
HEAD_DIMS = (8, 10, 64, 128)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "trained to 4096": {"original_max_position_embeddings": 4096},
    "attention factor given": {"attention_factor": 0.7},
    "both mscales": {"mscale": 1.5, "mscale_all_dim": 0.7},
    "one mscale of two": {"mscale": 1.5},
    "other ends": {"beta_fast": 20.0, "beta_slow": 2.5},
    "ends between pairs": {"truncate": False, "original_max_position_embeddings": 4096},
    "both ends in one pair": {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "not stretched": {"factor": 1.0},
}


def llama_config(parameters: dict[str, Any], head_dim: int, longest: int = LONGEST) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters=dict(parameters),
    )


def read(parameters: dict[str, Any], head_dim: int, longest: int = LONGEST) -> RopeConfig:
    return RopeConfig.from_hf({"max_position_embeddings": longest, "rope_parameters": parameters}, head_dim)


def tables(rotary: Rotary, positions: torch.Tensor, total_length: torch.Tensor | None) -> Any:
    step = Step(positions, torch.arange(positions.shape[1]), total_length, rotary.constants)
    return rotary(step)


def longrope(head_dim: int, **changes: Any) -> dict[str, Any]:
    pairs = np.arange(head_dim // 2)
    factors = {"short_factor": (1 + 0.1 * pairs).tolist(), "long_factor": (1 + 0.9 * pairs).tolist()}
    length = {"original_max_position_embeddings": TRAINED}
    return {"rope_type": "longrope", "rope_theta": 10000.0, **factors, **length, **changes}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", YARNS)
def test_yarn_tables_equal_those_of_transformers(name: str, head_dim: int) -> None:
    parameters = {**YARN, **YARNS[name]}
    positions = torch.tensor([POSITIONS])
    theirs = LlamaRotaryEmbedding(llama_config(parameters, head_dim))(torch.zeros(1), positions)
    rope = read(parameters, head_dim)
    for found, expected in zip(
        tables(Rotary(rope, head_dim, torch.float32), positions, None), theirs, strict=True
    ):
        assert found.shape == (1, len(POSITIONS), head_dim // 2)
        torch.testing.assert_close(found, expected[..., : head_dim // 2], rtol=0, atol=TABLE_TOLERANCE)


def test_yarn_keeps_pairs_that_turn_often_divides_those_that_do_not_and_blends_between() -> None:
    head_dim, trained = 128, 4096
    rope = read({**YARN, "original_max_position_embeddings": trained}, head_dim)
    base = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    ratio = inverse_frequencies(rope, head_dim).numpy() / base
    turns = trained * base / (2 * np.pi)
    # The blend ends on whole pairs: one pair of leeway on either side.
    np.testing.assert_allclose(ratio[:-1][turns[1:] > 32], 1.0, rtol=FLOAT32_RTOL)
    np.testing.assert_allclose(ratio[1:][turns[:-1] < 1], 1 / 4, rtol=FLOAT32_RTOL)
    blend = ratio[(ratio < 0.999) & (ratio > 0.251)]
    np.testing.assert_allclose(np.diff(blend), np.diff(blend)[0], rtol=1e-4)


def test_an_explicit_attention_factor_is_respected_and_an_absent_one_follows_the_paper() -> None:
    assert read({**YARN, "attention_factor": 0.7}, 8).attention_factor == 0.7
    assert read(YARN, 8).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert read(longrope(8, attention_factor=1.25), 8).attention_factor == 1.25
    expected = math.sqrt(1 + math.log(LONGEST / TRAINED) / math.log(TRAINED))
    assert read(longrope(8), 8).attention_factor == pytest.approx(expected)
    assert read(longrope(8, factor=1.0), 8).attention_factor == 1.0


@pytest.mark.parametrize(
    "changes", [{}, {"factor": 3.0}, {"factor": 0.5}, {"attention_factor": 1.25}], ids=str
)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("total_length", [1, TRAINED, TRAINED + 1, LONGEST])
def test_longrope_tables_switch_where_those_of_transformers_do(
    total_length: int, head_dim: int, changes: dict[str, Any]
) -> None:
    parameters = longrope(head_dim, **changes)
    positions = torch.arange(total_length).unsqueeze(0)
    theirs = LlamaRotaryEmbedding(llama_config(parameters, head_dim))(torch.zeros(1), positions)
    rotary = Rotary(read(parameters, head_dim), head_dim, torch.float32)
    for found, expected in zip(tables(rotary, positions, torch.tensor([total_length])), theirs, strict=True):
        torch.testing.assert_close(found, expected[..., : head_dim // 2], rtol=0, atol=TABLE_TOLERANCE)


def test_rows_of_a_batch_have_the_table_of_their_own_length() -> None:
    rotary = Rotary(read(longrope(8), 8), 8, torch.float32)
    positions = torch.tensor([[3, 4], [30, 31]])
    together = tables(rotary, positions, torch.tensor([5, 32]))
    short, long = longrope_inverse_frequencies(rotary.rope, 8)
    factor = rotary.rope.attention_factor
    for row, frequencies in enumerate((short, long)):
        angles = positions[row].unsqueeze(-1) * frequencies
        torch.testing.assert_close(together[0][row], angles.cos() * factor)
        torch.testing.assert_close(together[1][row], angles.sin() * factor)


def test_longrope_depends_on_the_length_and_has_no_single_table() -> None:
    rope = read(longrope(8), 8)
    assert rope.depends_on_length
    with pytest.raises(ValueError, match="use longrope_inverse_frequencies"):
        inverse_frequencies(rope, 8)
    assert set(Rotary(rope, 8, torch.float32).constants) == {"short_frequencies", "long_frequencies"}


@pytest.mark.parametrize("rope_type", ["default", "longrope"])
@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("spelling", ["inside", "beside"])
def test_partial_rotation_equals_that_of_transformers(rope_type: str, factor: float, spelling: str) -> None:
    head_dim = 16
    rotary_dim = int(head_dim * factor)
    parameters = (
        longrope(rotary_dim) if rope_type == "longrope" else {"rope_type": "default", "rope_theta": 10000.0}
    )
    theirs = Phi3Config(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        original_max_position_embeddings=TRAINED,
        rope_parameters={**parameters, "partial_rotary_factor": factor},
    )
    beside = {"partial_rotary_factor": factor} if spelling == "beside" else {}
    inside = {"partial_rotary_factor": factor} if spelling == "inside" else {}
    hf = {"max_position_embeddings": LONGEST, "rope_parameters": {**parameters, **inside}, **beside}
    rope, found_dim = read_partial_rope(ConfigReader(hf), head_dim)
    assert found_dim == rotary_dim
    positions = torch.tensor([POSITIONS])
    expected = Phi3RotaryEmbedding(theirs)(torch.zeros(1), positions)
    found = tables(Rotary(rope, rotary_dim, torch.float32), positions, torch.tensor([POSITIONS[-1] + 1]))
    for ours, table in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, table[..., : rotary_dim // 2], rtol=0, atol=TABLE_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("position", [0, 512, 4096])
def test_angles_are_float32_whatever_the_compute_type(dtype: torch.dtype, position: int) -> None:
    rope = RopeConfig("default", 10000.0)
    cos, sin = tables(Rotary(rope, 64, dtype), torch.tensor([[position]]), None)
    angles = position * 10000.0 ** (-np.arange(0, 64, 2, dtype=np.float64) / 64)
    # Half of the type's last place around one, and the float32 angle's own error at that range.
    tolerance = torch.finfo(dtype).eps / 2 + position * 1e-7
    np.testing.assert_allclose(cos[0, 0].double().numpy(), np.cos(angles), atol=tolerance, rtol=0)
    np.testing.assert_allclose(sin[0, 0].double().numpy(), np.sin(angles), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({**YARN, "factor": None}, "factor is missing"),
        ({**YARN, "original_max_position_embeddings": None}, "original_max_position_embeddings is missing"),
        ({**YARN, "mscale": 0}, "mscale is 0, expected a finite number above 0"),
        ({**YARN, "beta_fast": "32"}, "beta_fast is '32', expected a finite number"),
        ({**YARN, "truncate": 1}, "truncate is 1, expected true or false"),
        ({**YARN, "long_factor": [1.0]}, "unknown parameters for rope_type 'yarn': long_factor"),
        (longrope(8, long_factor=[1.0]), "long_factor has 1 numbers, expected 4, one a pair"),
        (longrope(8, short_factor=None), "short_factor is missing"),
        (longrope(8, short_factor=[1.0, 1.0, 0.0, 1.0]), "entry 2 of: short_factor is 0.0, expected"),
        (longrope(8, short_factor=1.0), "short_factor is 1.0, expected a list of numbers"),
        (longrope(8, original_max_position_embeddings=None), "original_max_position_embeddings is missing"),
        (longrope(8, beta_fast=32), "unknown parameters for rope_type 'longrope': beta_fast"),
    ],
)
def test_what_is_not_understood_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(parameters, 8)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({}, "partial_rotary_factor is missing"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected at most 1"),
        ({"partial_rotary_factor": 0.1}, "0 dimensions of a head are to be rotated"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor is 0.5 but 0.25 among the rope parameters",
        ),
    ],
)
def test_a_partial_rotation_that_is_not_understood_is_refused(hf: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_partial_rope(ConfigReader({"rope_theta": 10000.0, **hf}), 8)


@pytest.mark.parametrize(
    ("parameters", "positions"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, LONGEST),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}, int(2.5 * LONGEST)),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 2 * LONGEST),
        ({**YARN, "factor": 4.0}, LONGEST),
        ({**YARN, "factor": 8.0}, 8 * TRAINED),
        (longrope(8), LONGEST),
    ],
)
def test_positions_reach_as_far_as_the_type_stretches_them(
    parameters: dict[str, Any], positions: int
) -> None:
    assert read(parameters, 8).stretched(LONGEST) == positions
