"""The rotary embedding that a GGUF file asks for, as `rope_parameters` of a config.json.

| in the file | here |
|---|---|
| `rope.scaling.type` none, or linear with factor 1 | default |
| linear, yarn, with their parameters | the same |
| tensor rope_freqs: what every pair's frequency is divided by | llama3 if its formula gives these, else longrope |
| tensors rope_factors_short and rope_factors_long, of Phi-3 | longrope |
"""

from __future__ import annotations

from typing import Any

import torch

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.gguf_file import GGUFFile
from kvgraph.models.gguf_weights import GGUFWeight
from kvgraph.models.rope import RopeConfig
from kvgraph.models.rope_frequencies import inverse_frequencies

DIVISORS = "rope_freqs.weight"
LONG_DIVISORS, SHORT_DIVISORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Llama 3.1's, of which the file has only the result; the factor is the largest divisor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Both sides were computed in float32.
_SAME = 1e-5


def read_scaled_rope(reader: ConfigReader, file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of a model that turns whole heads.

    Args:
        reader: The architecture's metadata.
        file: Its file.
        theta: Base of the frequencies.
        head_dim: D.

    Raises:
        ValueError: The metadata asks for what is not implemented, or contradicts the tensors.
    """
    rotated = reader.integer("rope.dimension_count", default=head_dim)
    if rotated != head_dim:
        raise reader.error(f"rope.dimension_count is {rotated}, expected {head_dim}, the size of a head")
    _refuse_attention_factor(reader)
    scaled = _read_scaling(reader)
    if DIVISORS in file.tensors:
        if scaled["rope_type"] != "default":
            raise reader.error(
                f"both rope.scaling.type {scaled['rope_type']!r} and tensor {DIVISORS!r} scale the rotation; one of "
                "them is expected"
            )
        scaled = _divided(_read_vector(file, DIVISORS), theta, reader.integer("context_length"))
    return {"rope_theta": theta, **scaled}


def read_phi3_rope(reader: ConfigReader, file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` of Phi-3: a part of each head is turned, by longrope where the file has its tensors.

    Raises:
        ValueError: As for `read_scaled_rope`.
    """
    rotated = reader.integer("rope.dimension_count", default=head_dim)
    parameters = {"rope_theta": theta, "partial_rotary_factor": rotary_fraction(rotated, head_dim)}
    trained = reader.integer("rope.scaling.original_context_length")
    if LONG_DIVISORS not in file.tensors and SHORT_DIVISORS not in file.tensors:
        _refuse_attention_factor(reader)
        return {**parameters, **_read_scaling(reader)}
    kind = reader.text("rope.scaling.type", default="longrope")
    if kind != "longrope" or None in (file.tensors.get(LONG_DIVISORS), file.tensors.get(SHORT_DIVISORS)):
        raise reader.error(
            f"expected rope.scaling.type 'longrope' with {LONG_DIVISORS!r} and {SHORT_DIVISORS!r}"
        )
    return {
        **parameters,
        "rope_type": "longrope",
        "short_factor": _read_vector(file, SHORT_DIVISORS).tolist(),
        "long_factor": _read_vector(file, LONG_DIVISORS).tolist(),
        "attention_factor": reader.number("rope.scaling.attn_factor"),
        "original_max_position_embeddings": trained,
    }


def rotary_fraction(rotated: int, head_dim: int) -> float:
    """The fraction of a head of which int(head_dim * fraction) is `rotated`."""
    fraction = rotated / head_dim
    while int(head_dim * fraction) < rotated:
        fraction += 1e-9
    return fraction


def _refuse_attention_factor(reader: ConfigReader) -> None:
    reader.require("rope.scaling.attn_factor", 1.0, "another one is known of Phi-3's long rope alone")


def _read_scaling(reader: ConfigReader) -> dict[str, Any]:
    """The type and its parameters, as the metadata alone says them."""
    has_factor = reader.has("rope.scaling.factor", "rope.scale_linear")
    kind = reader.text("rope.scaling.type", default="linear" if has_factor else "none")
    reader.ignore("rope.scaling.finetuned", "rope.scaling.original_context_length")
    if kind == "none":
        reader.ignore("rope.scaling.factor", "rope.scale_linear")
        return {"rope_type": "default"}
    factor = reader.number("rope.scaling.factor", "rope.scale_linear", default=1.0)
    if kind == "linear":
        return {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _read_yarn(reader, factor)
    raise reader.error(f"rope.scaling.type {kind!r} is not implemented here; known: none, linear, yarn")


def _read_yarn(reader: ConfigReader, factor: float) -> dict[str, Any]:
    reader.require("rope.scaling.yarn_ext_factor", 1.0, "the blend between the two ends is all or nothing")
    context = reader.integer("context_length")
    parameters = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": reader.integer(
            "rope.scaling.original_context_length", default=context
        ),
        "attention_factor": reader.optional_number("rope.scaling.yarn_attn_factor"),
        "beta_fast": reader.optional_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": reader.optional_number("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in parameters.items() if value is not None}


def _divided(divisors: torch.Tensor, theta: float, context: int) -> dict[str, Any]:
    """The type that divides every pair's frequency by these numbers."""
    if bool((divisors == 1).all()):
        return {"rope_type": "default"}
    llama3: dict[str, Any] = {"rope_type": "llama3", "factor": divisors.max().item(), **_LLAMA3}
    plain, scaled = (
        inverse_frequencies(RopeConfig(rope_theta=theta, **parameters), 2 * len(divisors))
        for parameters in ({"rope_type": "default"}, llama3)
    )
    if torch.allclose(plain / scaled, divisors, rtol=_SAME, atol=0):
        return llama3
    return {
        "rope_type": "longrope",
        "short_factor": divisors.tolist(),
        "long_factor": divisors.tolist(),
        "attention_factor": 1.0,
        "original_max_position_embeddings": context,
    }


def _read_vector(file: GGUFFile, name: str) -> torch.Tensor:
    weight = GGUFWeight(file.tensors[name])
    if len(weight.spec.shape) != 1:
        raise ValueError(
            f"{file.path}: tensor {name!r} has shape {list(weight.spec.shape)}, expected a vector"
        )
    return weight.read_rows(0, weight.spec.shape[0]).to(torch.float32)
