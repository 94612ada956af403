from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Any

import pytest
from transformers import LlamaConfig

from kvgraph.models.config import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama(**changes: Any) -> dict[str, Any]:
    """A config.json with sizes of which no two are equal."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 97,
        "hidden_size": 20,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not ...}


def read(hf: dict[str, Any]) -> Any:
    """What the family makes of a config.json: a class of its own, beyond `ModelConfig`."""
    return ModelConfig.from_hf(hf)


def transformers_config(hf: dict[str, Any]) -> Any:
    """What transformers makes of a config.json; it writes into what it is given."""
    return LlamaConfig(**copy.deepcopy(hf))


FOUR_SPELLINGS = {
    "rope_parameters": llama(rope_parameters={**LLAMA3, "rope_theta": 5e5}, dtype="bfloat16"),
    "rope_scaling": llama(rope_scaling=LLAMA3, rope_theta=5e5, torch_dtype="bfloat16"),
    "type": llama(
        rope_scaling={"type" if key == "rope_type" else key: value for key, value in LLAMA3.items()},
        rope_theta=5e5,
        torch_dtype="bfloat16",
    ),
    "outer original length": llama(
        rope_parameters={
            **{key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"},
            "rope_theta": 5e5,
        },
        original_max_position_embeddings=32,
        torch_dtype="bfloat16",
        dtype="bfloat16",
    ),
}


@pytest.mark.parametrize("spelling", FOUR_SPELLINGS)
def test_every_spelling_gives_the_configuration_that_transformers_reads(spelling: str) -> None:
    config = read(FOUR_SPELLINGS[spelling])
    theirs = transformers_config(FOUR_SPELLINGS[spelling])
    # Done again by each rotary embedding; only then is an original length beside the object taken over.
    theirs.standardize_rope_params()
    assert {key: value for key, value in asdict(config.rope).items() if key in theirs.rope_parameters} == {
        key: value for key, value in theirs.rope_parameters.items() if key != "type"
    }
    assert config == read(FOUR_SPELLINGS["rope_parameters"])
    assert config.dtype == str(theirs.dtype).removeprefix("torch.")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": None},
        {"num_key_value_heads": ...},
        {"head_dim": None},
        {"head_dim": ..., "hidden_size": 24},
        {"hidden_act": ..., "tie_word_embeddings": ..., "bos_token_id": ..., "eos_token_id": ...},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_scaling": None, "rope_parameters": None},
    ],
)
def test_absent_keys_mean_what_transformers_takes_them_for(changes: dict[str, Any]) -> None:
    if changes.get("head_dim", 8) is None:
        changes = {**changes, "hidden_size": 40}
    config, theirs = read(llama(**changes)), transformers_config(llama(**changes))
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert getattr(config, name) == getattr(theirs, name), name
    assert config.eos_token_ids == (theirs.eos_token_id,)
    assert config.rope.rope_type == theirs.rope_parameters["rope_type"]
    assert config.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert config.rope.factor == theirs.rope_parameters.get("factor")


def test_head_dim_is_read_and_not_derived() -> None:
    config = read(llama(hidden_size=20, num_attention_heads=4, head_dim=8))
    assert config.head_dim == 8


@pytest.mark.parametrize(("eos", "ids"), [(2, (2,)), ([2, 7, 2], (2, 7)), (None, ()), ([], ())])
def test_end_tokens_are_one_or_many(eos: Any, ids: tuple[int, ...]) -> None:
    assert read(llama(eos_token_id=eos)).eos_token_ids == ids


def test_a_null_bos_token_is_none() -> None:
    assert read(llama(bos_token_id=None)).bos_token_id is None


def test_a_dtype_may_name_its_library() -> None:
    assert read(llama(torch_dtype="torch.float16")).dtype == "float16"


def test_an_unsaid_dtype_stays_unsaid() -> None:
    assert read(llama()).dtype is None
    assert read(llama(torch_dtype="auto")).dtype is None


REQUIRED = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [None, ...])
def test_a_missing_key_is_named(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"config.json: {key} is missing"):
        read(llama(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": "97"}, "vocab_size is '97', expected an integer of at least 1"),
        ({"vocab_size": True}, "vocab_size is True, expected an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected an integer of at least 1"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number above 0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a finite number above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf, expected a finite number above 0"),
        ({"rope_theta": 10**400}, "rope_theta is 10+, expected a finite number above 0"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', expected true or false"),
        ({"hidden_act": 3}, "hidden_act is 3, expected a string"),
        ({"eos_token_id": [2, -1]}, r"eos_token_id is \[2, -1\], expected a token id"),
        ({"bos_token_id": [1, 2]}, "bos_token_id is .*, expected one token id"),
        ({"dtype": "float8"}, "dtype is 'float8', expected one of float32, float16, bfloat16"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "dtype is 'float16' but torch_dtype is 'float32'"),
        ({"rope_scaling": [8]}, r"rope_scaling is \[8\], expected an object"),
        ({"num_key_value_heads": 3}, "expected a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 22}, "hidden_size 22 is not a multiple of 4 heads"),
    ],
)
def test_a_malformed_value_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(llama(**changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 4096),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("partial_rotary_factor", 0.5),
        ("attn_logit_softcapping", 50.0),
        ("num_experts", 8),
        ("a_feature_of_tomorrow", 1),
        ("rope_interleaved", True),
        ("is_encoder_decoder", True),
    ],
)
def test_a_key_that_nobody_implements_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{key}=.* is not implemented for model_type 'llama'"):
        read(llama(**{key: value}))


def test_all_refused_keys_are_listed() -> None:
    with pytest.raises(ValueError, match="num_experts=8, sliding_window=16 may change"):
        read(llama(sliding_window=16, num_experts=8))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("quantization_config", {"quant_method": "gptq"}, "already quantized"),
        ("auto_map", {"AutoModel": "modeling_x.X"}, "never run"),
    ],
)
def test_some_refusals_explain_themselves(key: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is set: .*{reason}"):
        read(llama(**{key: value}))


def test_keys_without_effect_are_accepted() -> None:
    harmless = {
        "_name_or_path": "x",
        "pretraining_tp": 4,
        "pad_token_id": -1,
        "attention_dropout": 0.1,
        "temperature": 0.6,
        "partial_rotary_factor": 1.0,
        "is_encoder_decoder": False,
        "quantization_config": None,
        "sliding_window": None,
    }
    assert read(llama(**harmless)) == read(llama())


def test_whatever_transformers_writes_is_accepted() -> None:
    written = json.loads(
        transformers_config(llama(rope_parameters={"rope_theta": 1e4, **LLAMA3})).to_json_string(False)
    )
    assert read(written) == read(llama(rope_theta=1e4, rope_scaling=LLAMA3))


def test_the_configuration_is_plain_json() -> None:
    config = read(llama(rope_scaling=LLAMA3, eos_token_id=[2, 7], bos_token_id=None))
    data = config.to_json()
    assert json.loads(json.dumps(data)) == data
    assert (data["head_dim"], data["eos_token_ids"], data["bos_token_id"]) == (8, [2, 7], None)
    assert data["rope"]["factor"] == LLAMA3["factor"]
