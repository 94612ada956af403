from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvgraph.models.rope import RopeConfig
from kvgraph.models.rope_frequencies import dynamic_inverse_frequencies, inverse_frequencies

TRAINED = 16
# On both sides of the trained length.
POSITIONS = (0, 1, 15, 16, 17, 63)
# float32 against a float64 formula: a few units in the last place of pow.
FLOAT32_RTOL = 1e-6
# The same against the formula of transformers, which takes a scalar length through Python's float64.
DYNAMIC_RTOL = 5e-7

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STATIC: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default, large theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
    "llama3, 8192": {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
    "llama3, 16": {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": TRAINED},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
HEAD_DIMS = (4, 8, 10, 64, 128)


def read(parameters: dict[str, Any], head_dim: int = 8, **others: Any) -> RopeConfig:
    return RopeConfig.from_hf(
        {"max_position_embeddings": TRAINED, "rope_parameters": parameters, **others}, head_dim
    )


def hf_config(parameters: dict[str, Any], head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=TRAINED,
        rope_parameters=dict(parameters),
    )


def powers(theta: float | NDArray[np.float64], head_dim: int) -> NDArray[np.float64]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return np.asarray(np.asarray(theta)[..., None] ** -exponents)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", STATIC)
def test_static_angles_equal_those_of_transformers(name: str, head_dim: int) -> None:
    rope = read(STATIC[name], head_dim)
    positions = torch.tensor([POSITIONS])
    cos, sin = LlamaRotaryEmbedding(hf_config(STATIC[name], head_dim))(torch.zeros(1), positions)
    frequencies = inverse_frequencies(rope, head_dim)
    assert frequencies.dtype == torch.float32
    assert frequencies.shape == (head_dim // 2,)
    angles = positions[..., None].float() * frequencies
    assert torch.equal(angles.cos(), cos[..., : head_dim // 2])
    assert torch.equal(angles.sin(), sin[..., : head_dim // 2])
    assert rope.attention_factor == 1.0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dynamic_frequencies_equal_those_of_transformers_at_every_length(head_dim: int) -> None:
    lengths = [position + 1 for position in POSITIONS]
    ours = dynamic_inverse_frequencies(read(DYNAMIC, head_dim), head_dim, torch.tensor(lengths))
    formula = ROPE_INIT_FUNCTIONS["dynamic"]
    theirs = [formula(hf_config(DYNAMIC, head_dim), None, seq_len=length)[0] for length in lengths]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, torch.stack(theirs), rtol=DYNAMIC_RTOL, atol=0)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_dynamic_frequencies_follow_the_formula(head_dim: int) -> None:
    lengths = np.array([1, 16, 17, 64, 1000])
    stretch = 4.0 * np.maximum(lengths, TRAINED) / TRAINED - 3.0
    expected = powers(10000.0 * stretch ** (head_dim / (head_dim - 2)), head_dim)
    ours = dynamic_inverse_frequencies(read(DYNAMIC, head_dim), head_dim, torch.from_numpy(lengths))
    np.testing.assert_allclose(ours.numpy(), expected, rtol=5 * FLOAT32_RTOL)


def test_llama3_divides_long_waves_keeps_short_ones_and_blends_between() -> None:
    head_dim = 64
    base = powers(500000.0, head_dim)
    waves = 8192 * base / (2 * np.pi)
    kept = np.clip((waves - 1.0) / (4.0 - 1.0), 0, 1)
    assert (kept == 0).any()
    assert (kept == 1).any()
    assert ((kept > 0) & (kept < 1)).any()
    ours = inverse_frequencies(read(STATIC["llama3, 8192"], head_dim), head_dim)
    np.testing.assert_allclose(ours.numpy(), kept * base + (1 - kept) * base / 8, rtol=FLOAT32_RTOL)


def test_rows_of_a_batch_have_their_own_dynamic_frequencies() -> None:
    rope = read(DYNAMIC)
    together = dynamic_inverse_frequencies(rope, 8, torch.tensor([5, 40, 64]))
    for row, length in enumerate((5, 40, 64)):
        assert torch.equal(together[row], dynamic_inverse_frequencies(rope, 8, torch.tensor([length]))[0])


def test_dynamic_frequencies_trace_with_a_symbolic_batch() -> None:
    rope = read(DYNAMIC)

    class Frequencies(torch.nn.Module):
        def forward(self, total_length: torch.Tensor) -> torch.Tensor:
            return dynamic_inverse_frequencies(rope, 8, total_length)

    batch = torch.export.Dim("B")
    program = torch.export.export(Frequencies(), (torch.tensor([3, 40]),), dynamic_shapes=({0: batch},))
    lengths = torch.tensor([1, 16, 17, 64, 99])
    assert torch.equal(program.module()(lengths), dynamic_inverse_frequencies(rope, 8, lengths))


def test_dynamic_rope_has_no_static_frequencies() -> None:
    assert read(DYNAMIC).depends_on_length
    with pytest.raises(ValueError, match="depends on the total length"):
        inverse_frequencies(read(DYNAMIC), 8)


def test_dynamic_rope_stretches_from_max_position_embeddings_as_transformers_does() -> None:
    assert (
        read({**DYNAMIC, "original_max_position_embeddings": 7}).original_max_position_embeddings == TRAINED
    )


@pytest.mark.parametrize("parameters", [*STATIC.values(), DYNAMIC])
def test_rope_scaling_and_theta_beside_it_mean_the_same(parameters: dict[str, Any]) -> None:
    scaling = {
        "type" if key == "rope_type" else key: parameters[key] for key in parameters if key != "rope_theta"
    }
    hf = {
        "max_position_embeddings": TRAINED,
        "rope_scaling": scaling,
        "rope_theta": parameters["rope_theta"],
    }
    assert RopeConfig.from_hf(hf, 8) == read(parameters)


@pytest.mark.parametrize("hf", [{}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_theta": None}])
def test_without_rope_keys_theta_is_the_family_default(hf: dict[str, Any]) -> None:
    assert RopeConfig.from_hf(hf, 8, default_theta=10000.0) == RopeConfig("default", 10000.0)


def test_a_family_without_a_default_needs_theta() -> None:
    with pytest.raises(ValueError, match="rope_theta is missing"):
        RopeConfig.from_hf({}, 8)


@pytest.mark.parametrize(
    ("parameters", "others", "message"),
    [
        (
            {"rope_type": "proportional", "factor": 4.0},
            {},
            "'proportional' is not implemented; known: default, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_type": "mystery"}, {}, "'mystery' is not implemented"),
        (
            {"rope_type": "linear", "type": "dynamic", "factor": 2.0},
            {},
            "rope_type is 'linear' but type is 'dynamic'",
        ),
        ({"rope_type": "linear"}, {}, "factor is missing"),
        ({"rope_type": "linear", "factor": 0}, {}, "factor is 0, expected a finite number above 0"),
        ({"rope_type": "linear", "factor": "4"}, {}, "factor is '4', expected a finite number"),
        (LLAMA3, {}, "original_max_position_embeddings is missing"),
        ({**STATIC["llama3, 16"], "low_freq_factor": None}, {}, "low_freq_factor is missing"),
        (
            {**STATIC["llama3, 16"], "high_freq_factor": 1.0},
            {},
            "high_freq_factor is 1.0, expected more than",
        ),
        (
            STATIC["llama3, 16"],
            {"original_max_position_embeddings": 32},
            "is 32 but 16 among the rope parameters",
        ),
        (STATIC["default"], {"rope_theta": 5.0}, "rope_theta is 5.0 but 10000.0 among the rope parameters"),
        (STATIC["linear"], {"rope_scaling": DYNAMIC}, "rope_parameters is .* but rope_scaling is"),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 32},
            {},
            "unknown parameters .*'linear': beta_fast",
        ),
        ({"rope_type": "default", "factor": 2.0}, {}, "unknown parameters for rope_type 'default': factor"),
        (
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            {},
            "unknown parameters .* partial_rotary_factor",
        ),
        (
            {"full_attention": STATIC["default"], "sliding_attention": STATIC["linear"]},
            {},
            r"parameters per layer type \(full_attention, sliding_attention\)",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    parameters: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(parameters, **{"rope_theta": 10000.0, **others} if "rope_theta" not in parameters else others)


@pytest.mark.parametrize(("parameters", "head_dim"), [(STATIC["default"], 7), (DYNAMIC, 2)])
def test_a_head_that_cannot_be_rotated_is_refused(parameters: dict[str, Any], head_dim: int) -> None:
    with pytest.raises(
        ValueError, match=f"{head_dim} dimensions of a head are to be rotated, expected an even"
    ):
        read(parameters, head_dim)
