"""Decoders with layer norms: what their config.json may say, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from kvgraph.models.config import ModelConfig
from kvgraph.models.family import family
from kvgraph.models.layers import Precision
from kvgraph.models.sources import plan_weights

FLOAT32 = Precision(torch.float32, torch.float32)
EPSILONS = {
    "bloom": "layer_norm_epsilon",
    "falcon": "layer_norm_epsilon",
    "gpt2": "layer_norm_epsilon",
    "gpt_neox": "layer_norm_eps",
    "mpt": "layer_norm_epsilon",
    "phi": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
}
# Keys as published files have them, of each generation; sizes are small.
PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "published_layer_norm.json").read_text(encoding="utf-8")
)


def read(hf: dict[str, Any]) -> Any:
    """What the family makes of a config.json: a class of its own, beyond `ModelConfig`."""
    return ModelConfig.from_hf(hf)


def changed(model_type: str, **changes: Any) -> dict[str, Any]:
    """A published file with some keys changed; `...` leaves one out."""
    merged = {**PUBLISHED[model_type], **changes}
    return {key: value for key, value in merged.items() if value is not ...}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_keys_mean_what_transformers_takes_them_for(model_type: str) -> None:
    config = read(PUBLISHED[model_type])
    keys = {key: value for key, value in PUBLISHED[model_type].items() if key != "model_type"}
    theirs = AutoConfig.for_model(model_type, **json.loads(json.dumps(keys)))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    for name in (*sizes, "tie_word_embeddings", "bos_token_id", EPSILONS[model_type]):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert config.head_dim == theirs.hidden_size // theirs.num_attention_heads


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_whatever_transformers_writes_says_the_same(model_type: str) -> None:
    keys = {key: value for key, value in PUBLISHED[model_type].items() if key != "model_type"}
    written = json.loads(AutoConfig.for_model(model_type, **keys).to_json_string(use_diff=False))
    assert read(written) == read(PUBLISHED[model_type])


@pytest.mark.parametrize(
    ("model_type", "changes", "name", "value"),
    [
        ("gpt2", {"n_inner": 44}, "intermediate_size", 44),
        ("gpt2", {}, "intermediate_size", 120),
        ("gpt2", {"n_ctx": ...}, "max_positions", 64),
        ("gpt_neox", {}, "rotary_dim", 4),
        ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 3.0}}, "max_positions", 192),
        ("phi", {}, "rotary_dim", 4),
        ("starcoder2", {"sliding_window": None}, "sliding_window", None),
        ("falcon", {}, "num_key_value_heads", 1),
        ("falcon", {"multi_query": False}, "num_key_value_heads", 6),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, "num_key_value_heads", 2),
        ("falcon", {"new_decoder_architecture": True}, "num_ln_in_parallel_attn", 2),
        ("falcon", {"alibi": True, "rope_theta": 10000.0}, "rope", None),
        ("falcon", {"ffn_hidden_size": 44, "ff_factor": 4}, "intermediate_size", 44),
        ("falcon", {}, "max_positions", 2048),
        ("bloom", {}, "max_positions", 2048),
        ("bloom", {"seq_length": 64}, "max_positions", 64),
        ("mpt", {"expansion_ratio": 2}, "intermediate_size", 120),
        ("mpt", {}, "clip_qkv", 6.0),
    ],
)
def test_a_key_reaches_the_configuration(
    model_type: str, changes: dict[str, Any], name: str, value: Any
) -> None:
    assert getattr(read(changed(model_type, **changes)), name) == value


NEOX_ROPE = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10000},
        {"rotary_emb_base": ..., "rope_theta": 10000.0},
        {"rotary_pct": ..., "partial_rotary_factor": 0.25},
        {"rope_parameters": NEOX_ROPE},
        {"rotary_emb_base": ..., "rotary_pct": ..., "rope_parameters": NEOX_ROPE},
    ],
)
def test_every_spelling_of_partial_rope_is_the_same(changes: dict[str, Any]) -> None:
    assert read(changed("gpt_neox", **changes)) == read(PUBLISHED["gpt_neox"])


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("gpt2", {"n_embd": ...}, "hidden_size or n_embd is missing"),
        ("gpt2", {"n_embd": "30"}, "n_embd is '30', expected an integer"),
        ("gpt2", {"hidden_size": 60}, "hidden_size is 60 but n_embd is 30"),
        ("gpt2", {"n_ctx": 128}, "n_positions is 64 but n_ctx is 128"),
        ("gpt2", {"n_embd": 31}, "hidden_size 31 is not a multiple of 3 heads"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True .* is not implemented"),
        ("gpt2", {"layer_norm_epsilon": ...}, "layer_norm_epsilon is missing"),
        ("gpt_neox", {"rotary_pct": ...}, "partial_rotary_factor is missing"),
        ("gpt_neox", {"rotary_pct": 1.5}, "partial_rotary_factor is 1.5, expected at most 1"),
        ("gpt_neox", {"rotary_pct": 0.3125}, "5 dimensions of a head are to be rotated"),
        ("gpt_neox", {"rope_theta": 500.0}, "rope_theta is 500.0 but rotary_emb_base is 10000"),
        ("gpt_neox", {"rope_scaling": {"type": "su"}}, "rope_type 'su' is not implemented"),
        ("phi", {"tie_word_embeddings": True}, "tie_word_embeddings is True, expected False"),
        ("phi", {"partial_rotary_factor": ...}, "partial_rotary_factor is missing"),
        ("phi", {"hidden_size": 61}, "hidden_size 61 is not a multiple of 6 heads"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type is 'gated', expected 'default'"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type is 'rms_norm', expected 'layer_norm'"),
        ("starcoder2", {"scale_attn_weights": False}, "scale_attn_weights is False, expected True"),
        ("starcoder2", {"sliding_window": 0}, "sliding_window is 0, expected an integer of at least 1"),
        ("starcoder2", {"layer_norm_epsilon": 1e-6}, "norm_epsilon is 1e-05 but layer_norm_epsilon is 1e-06"),
        ("starcoder2", {"use_bias": ...}, "use_bias is missing"),
        ("falcon", {"bias": ...}, "bias is missing"),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn is false; branches of new_decoder_architecture are always parallel",
        ),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2, expected 1"),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}, "a multiple of .* 4"),
        ("falcon", {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}, "auto_map is set: .* never run"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True, expected False",
        ),
        ("bloom", {"n_embed": 60, "hidden_size": 64}, "hidden_size is 64 but n_embed is 60"),
        ("mpt", {"no_bias": False}, "no_bias is False, expected True"),
        ("mpt", {"logit_scale": 0.5}, "logit_scale is 0.5, expected None"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm', expected"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi is False, expected True"),
        ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max is 16, expected 8"),
        (
            "mpt",
            {"attn_config": {"attn_type": "multiquery_attention"}},
            "attn_type is 'multiquery_attention'",
        ),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln is True, expected False"),
        ("mpt", {"attn_config": {"prefix_lm": True}}, "prefix_lm is True, expected False"),
        ("mpt", {"attn_config": {"rope": True}}, "attn_config: rope=True may change"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(changed(model_type, **changes))


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_an_unknown_key_is_refused(model_type: str) -> None:
    with pytest.raises(ValueError, match=f"a_feature_of_tomorrow=1 .* for model_type '{model_type}'"):
        read(changed(model_type, a_feature_of_tomorrow=1))


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_an_unknown_activation_is_refused(model_type: str) -> None:
    key = {"gpt2": "activation_function", "falcon": "activation"}.get(model_type, "hidden_act")
    config = read(changed(model_type, **{"activation_function": ..., key: "tahn"}))
    with torch.device("meta"), pytest.raises(ValueError, match="hidden_act 'tahn' is not known"):
        family(model_type).build(config, FLOAT32)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom"])
def test_names_of_a_model_without_its_head_are_known(model_type: str) -> None:
    with torch.device("meta"):
        decoder = family(model_type).build(read(PUBLISHED[model_type]), FLOAT32)
    whole = plan_weights(family(model_type), decoder)
    bare_names = {name.removeprefix("transformer.") for name in whole.shapes}
    assert all(name.startswith("transformer.") for name in whole.shapes)
    assert plan_weights(family(model_type), decoder, whole.shapes).shapes == whole.shapes
    assert plan_weights(family(model_type), decoder, bare_names).shapes.keys() == bare_names
