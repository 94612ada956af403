"""Which rows of a fused tensor become queries, keys and values, against a reshape of the whole."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraph.models.config import ModelConfig
from kvgraph.models.family import Part
from kvgraph.models.fused_qkv import Ranges, grouped_ranges, qkv_parts, stacked_ranges

DIM = 4


def config(heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        model_type="none",
        vocab_size=97,
        hidden_size=20,
        intermediate_size=44,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=DIM,
        max_position_embeddings=64,
        hidden_act="gelu",
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        dtype=None,
    )


def taken(ranges: Ranges) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1), (1, 1)])
def test_grouped_rows_are_queries_key_and_value_of_each_key_value_head(heads: int, kv_heads: int) -> None:
    ranges = grouped_ranges(config(heads, kv_heads))
    rows = np.arange((heads + 2 * kv_heads) * DIM).reshape(kv_heads, heads // kv_heads + 2, DIM)
    assert taken(ranges["q"]) == rows[:, :-2].ravel().tolist()
    assert taken(ranges["k"]) == rows[:, -2].ravel().tolist()
    assert taken(ranges["v"]) == rows[:, -1].ravel().tolist()


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
def test_stacked_rows_are_all_queries_all_keys_all_values(heads: int, kv_heads: int) -> None:
    ranges = stacked_ranges(config(heads, kv_heads))
    rows = np.arange((heads + 2 * kv_heads) * DIM)
    for name, expected in zip("qkv", np.split(rows, [heads * DIM, (heads + kv_heads) * DIM]), strict=True):
        assert taken(ranges[name]) == expected.tolist()


def test_parts_name_the_three_projections_of_a_layer() -> None:
    parts = qkv_parts(stacked_ranges(config(6, 2)), "layers.{i}.", "bias")
    assert parts == (
        Part("layers.{i}.self_attn.q_proj.bias", ((0, 24),)),
        Part("layers.{i}.self_attn.k_proj.bias", ((24, 32),)),
        Part("layers.{i}.self_attn.v_proj.bias", ((32, 40),)),
    )
