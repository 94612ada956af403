"""Sorting weights into the parts of a model."""

from __future__ import annotations

import pytest

from kvgraph.export.weight_kinds import (
    Weight,
    element_bits,
    group_weights,
    layer_pattern,
    part_of,
    size_parts,
    tensor_bytes,
)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.embed_positions.weight", "embedding"),
        ("model.embed_layernorm.bias", "norms"),
        ("model.layers.0.self_attn.q_proj.bias", "attention"),
        ("model.layers.0.self_attn.q_norm.weight", "norms"),
        ("model.layers.0.mlp.down_proj.weight", "ffn"),
        ("model.layers.0.input_layernorm.weight", "norms"),
        ("model.norm.weight", "norms"),
        ("lm_head.weight", "head"),
        ("vision.patch.weight", "other"),
    ],
)
def test_part_is_told_by_the_name(name: str, part: str) -> None:
    assert part_of(name) == part


def test_weights_that_no_part_claims_still_count() -> None:
    parts = size_parts(group_weights([Weight("vision.patch.weight", "other", "float32", (3, 5))]))
    assert sum(part.parameters for part in parts) == 15


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [
        ("float32", 32),
        ("bfloat16", 16),
        ("float8_e4m3fn", 8),
        ("float8e4m3fn", 8),
        ("uint4", 4),
        ("float4_e2m1", 4),
    ],
)
def test_width_of_an_element_is_in_its_name(dtype: str, bits: int) -> None:
    assert element_bits(dtype) == bits


def test_narrow_elements_are_packed() -> None:
    assert tensor_bytes("int4", 7) == 4


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("model.layers.31.mlp.up_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
        ("model.layers.0.mlp.experts.12.up_proj.weight", "model.layers.{i}.mlp.experts.{e}.up_proj.weight"),
        ("present.3.key", "present.{i}.key"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_pattern_replaces_layer_and_expert(name: str, pattern: str) -> None:
    assert layer_pattern(name) == pattern
