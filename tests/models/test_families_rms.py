"""What the configs and tensors of decoders in the manner of Llama are taken to mean."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.config import ModelConfig
from kvgraph.models.families.gemma import embedding_scale
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import plan_weights

FULL, SLIDING = "full_attention", "sliding_attention"
FLOAT32 = Precision(torch.float32, torch.float32)
FILES = [
    name
    for name in json.loads((Path(__file__).parent / "published_rms.json").read_text(encoding="utf-8"))
    if name != "sizes"
]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}

Published = Callable[..., dict[str, Any]]


def read(hf: dict[str, Any]) -> Any:
    """What the family makes of a config.json: a class of its own, beyond `ModelConfig`."""
    return ModelConfig.from_hf(hf)


def transformers_config(hf: dict[str, Any]) -> Any:
    """What transformers makes of a config.json; it writes into what it is given."""
    config = AutoConfig.for_model(**copy.deepcopy(hf))
    config.standardize_rope_params()
    return config


def check_rope(ours: Any, theirs: dict[str, Any]) -> None:
    assert ours.rope_type == theirs["rope_type"]
    assert ours.rope_theta == theirs["rope_theta"]
    if ours.rope_type != "default":
        for key in ("factor", "original_max_position_embeddings"):
            assert theirs.get(key) in (None, getattr(ours, key)), key
    for key in ("short_factor", "long_factor"):
        assert getattr(ours, key) == (tuple(theirs[key]) if key in theirs else None)


@pytest.mark.parametrize("name", FILES)
def test_published_files_mean_what_transformers_takes_them_for(name: str, published_rms: Published) -> None:
    config, theirs = read(published_rms(name)), transformers_config(published_rms(name))
    # What is spelled otherwise there, and what is not kept.
    apart = ("rope", "sliding_rope", "eos_token_ids", "dtype", "rotary_dim", "hidden_act", "head_dim")
    for key, value in config.to_json().items():
        if key not in apart:
            assert value == getattr(theirs, key), key
    activation = "hidden_act" if hasattr(theirs, "hidden_act") else "hidden_activation"
    assert config.hidden_act == getattr(theirs, activation)
    derived = config.hidden_size // config.num_attention_heads
    assert config.head_dim == (getattr(theirs, "head_dim", None) or derived)
    if config.model_type == "gemma3_text":
        check_rope(config.rope, theirs.rope_parameters[FULL])
        check_rope(config.sliding_rope, theirs.rope_parameters[SLIDING])
    else:
        check_rope(config.rope, theirs.rope_parameters)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_whatever_transformers_writes_says_the_same(
    name: str, complete: bool, published_rms: Published
) -> None:
    theirs = AutoConfig.for_model(**published_rms(name))
    assert read(json.loads(theirs.to_json_string(use_diff=not complete))) == read(published_rms(name))


@pytest.mark.parametrize(
    "model_type", ["mistral", "qwen2", "qwen3", "gemma", "gemma2", "smollm3", "granite", "olmo2"]
)
def test_four_spellings_of_a_rope_are_one(model_type: str, published_rms: Published) -> None:
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5},
    ]
    none: dict[str, Any] = {"rope_theta": ..., "rope_scaling": ...}
    configs = [read(published_rms(model_type, **none | spelling)) for spelling in spellings]
    assert all(config == configs[0] for config in configs)
    assert (configs[0].rope.rope_type, configs[0].rope.rope_theta) == ("linear", 5e5)
    assert configs[0].max_positions == 4 * configs[0].max_position_embeddings


def test_gemma3_reads_ropes_nested_by_layer_type_and_in_keys_of_their_own(published_rms: Published) -> None:
    nested = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    apart: dict[str, Any] = {"rope_theta": ..., "rope_scaling": ..., "rope_local_base_freq": ...}
    name = "gemma3_text, stretched"
    assert read(published_rms(name)) == read(published_rms(name, rope_parameters=nested, **apart))


def test_phi3_reads_the_first_name_of_longrope(published_rms: Published) -> None:
    first = published_rms("phi3, longrope")
    first["rope_scaling"]["type"] = "su"
    assert read(first) == read(published_rms("phi3, longrope"))


@pytest.mark.parametrize("name", FILES)
def test_every_parameter_has_a_source_and_every_source_a_parameter(
    name: str, published_rms: Published
) -> None:
    config = read(published_rms(name))
    with torch.device("meta"):
        decoder = family(config.model_type).build(config, FLOAT32)
    plan = plan_weights(family(config.model_type), decoder)
    assert plan.sources.keys() == decoder.weights().keys()
    assert plan.shapes.keys() == {source for weight in plan.sources.values() for source in weight.names}


def changed_checkpoint(source: Path, target: Path, add: dict[str, Any], remove: list[str]) -> None:
    """Copy a checkpoint with some tensors changed, and check it against what its config asks for."""
    from safetensors.torch import load_file, save_file

    tensors = {**load_file(source / "model.safetensors"), **add}
    save_file({name: tensors[name] for name in tensors if name not in remove}, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(target)
    with torch.device("meta"):
        decoder = family(checkpoint.config.model_type).build(checkpoint.config, FLOAT32)
    plan = plan_weights(family(checkpoint.config.model_type), decoder)
    checkpoint.weights().check(plan.shapes, plan.ignorable)


@pytest.mark.parametrize(
    ("model_type", "name", "size"),
    [
        ("llama", "model.layers.1.self_attn.q_norm.weight", 8),
        ("llama", "model.layers.0.self_attn.q_proj.bias", 32),
        ("mistral", "model.layers.0.mlp.up_proj.bias", 44),
        ("qwen2", "model.layers.0.self_attn.o_proj.bias", 20),
        ("qwen3", "model.layers.0.self_attn.q_proj.bias", 32),
        ("gemma", "model.layers.0.pre_feedforward_layernorm.weight", 20),
        ("olmo2", "model.layers.0.input_layernorm.weight", 20),
    ],
)
def test_a_tensor_that_the_config_rules_out_is_refused(
    model_type: str, name: str, size: int, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"not expected: {name}"):
        changed_checkpoint(tiny_checkpoint(model_type, **ROPE), tmp_path, {name: torch.ones(size)}, [])


@pytest.mark.parametrize(
    ("model_type", "changes", "name"),
    [
        ("qwen2", {}, "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", {}, "model.layers.0.self_attn.k_norm.weight"),
        ("granite", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ("granite", {"mlp_bias": True}, "model.layers.0.mlp.up_proj.bias"),
        ("olmo2", {}, "model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_a_tensor_that_the_config_asks_for_must_be_there(
    model_type: str, changes: dict[str, Any], name: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"missing.*{name}"):
        changed_checkpoint(tiny_checkpoint(model_type, **ROPE, **changes), tmp_path, {}, [name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [21, 640, 1152, 2304, 3072, 5376])
def test_the_scale_of_embeddings_is_rounded_as_transformers_rounds_it(
    dtype: torch.dtype, hidden_size: int
) -> None:
    assert embedding_scale(hidden_size, dtype) == torch.tensor(hidden_size**0.5).to(dtype).item()
