"""The config.json of the textbook decoders: what it may say, and what is refused."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

import pytest
import torch

from kvgraph.models.config import ModelConfig
from kvgraph.models.family import FAMILIES, family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import plan_weights

FLOAT32 = Precision(torch.float32, torch.float32)
TEXTBOOK = ("pre_norm_decoder", "post_norm_decoder")


def documented(model_type: str) -> dict[str, Any]:
    """The example in the family's own docstring."""
    docstring = importlib.import_module(FAMILIES[model_type]).__doc__
    assert docstring is not None
    example = re.search(r"^ {4}\{.*?^ {4}\}", docstring, re.DOTALL | re.MULTILINE)
    assert example is not None
    config: dict[str, Any] = json.loads(example[0])
    return config


def read(model_type: str, **changes: Any) -> Any:
    """What the family makes of its documented example with some keys changed; `...` leaves one out."""
    merged = {**documented(model_type), **changes}
    return ModelConfig.from_hf({key: value for key, value in merged.items() if value is not ...})


def planned(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint must hold."""
    with torch.device("meta"):
        decoder = family(config.model_type).build(config, FLOAT32)
    return dict(plan_weights(family(config.model_type), decoder).shapes)


@pytest.mark.parametrize("model_type", TEXTBOOK)
def test_documented_example_is_read(model_type: str) -> None:
    config = read(model_type)
    assert (config.model_type, config.head_dim, config.max_positions) == (model_type, 64, 1024)
    assert (
        len(planned(config))
        == {"pre_norm_decoder": 2 + 8 * 9 + 1, "post_norm_decoder": 2 + 6 * 16}[model_type]
    )


@pytest.mark.parametrize("model_type", TEXTBOOK)
def test_what_changes_numerics_has_to_be_said(model_type: str) -> None:
    optional = {"num_key_value_heads"}
    for key in documented(model_type).keys() - optional - {"model_type"}:
        with pytest.raises(ValueError, match=rf"config.json: {key} is missing"):
            read(model_type, **{key: ...})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"head.weight": (4096, 512)}),
        ({"head_bias": True}, {"head.bias": (4096,)}),
        ({"tie_word_embeddings": True}, {"head.weight": None, "embed.weight": (4096, 512)}),
        ({"positions": "learned"}, {"positions.weight": (1024, 512)}),
        (
            {},
            {
                "positions.weight": None,
                "blocks.5.ffn.w2.weight": (512, 2048),
                "blocks.0.ffn.w1.bias": (2048,),
            },
        ),
        (
            {"ffn": "swiglu", "hidden_act": ...},
            {
                "blocks.5.ffn.w2.weight": (2048, 512),
                "blocks.5.ffn.w3.weight": (512, 2048),
                "blocks.0.ffn.w1.bias": None,
            },
        ),
        ({"head_dim": 32}, {"blocks.0.attn.wo.weight": (512, 256), "blocks.0.attn.wq.bias": (256,)}),
    ],
)
def test_post_norm_config_decides_which_tensors_there_are(
    changes: dict[str, Any], expected: dict[str, tuple[int, ...] | None]
) -> None:
    shapes = planned(read("post_norm_decoder", **changes))
    assert {name: shapes.get(name) for name in expected} == expected


def test_key_value_heads_default_to_heads() -> None:
    assert read("pre_norm_decoder", num_key_value_heads=...).num_key_value_heads == 8


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("pre_norm_decoder", {"eps_inside_root": "yes"}, "eps_inside_root is 'yes', expected true or false"),
        ("pre_norm_decoder", {"attention_bias": True}, "attention_bias=True may change"),
        ("pre_norm_decoder", {"head_dim": 31}, "31 dimensions of a head are to be rotated"),
        (
            "post_norm_decoder",
            {"positions": "relative"},
            "positions is 'relative', expected one of sinusoidal",
        ),
        ("post_norm_decoder", {"ffn": "geglu"}, "ffn is 'geglu', expected one of plain, swiglu"),
        ("post_norm_decoder", {"ffn": "swiglu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("post_norm_decoder", {"num_key_value_heads": 2}, "num_key_value_heads is 2, expected 8"),
        ("post_norm_decoder", {"rope_theta": 10000.0}, "rope_theta=10000.0 may change"),
        ("post_norm_decoder", {"positions": "rotary"}, "rope_theta is missing"),
        ("post_norm_decoder", {"positions": "rotary", "rope_theta": 1e4}, "rope_interleaved is missing"),
        (
            "post_norm_decoder",
            {"hidden_size": 513, "head_dim": 64},
            "hidden_size is 513, expected an even number",
        ),
        (
            "post_norm_decoder",
            {"head_bias": True, "tie_word_embeddings": True},
            "head_bias and tie_word_embeddings",
        ),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(model_type, **changes)
