"""What configurations of encoder-decoder models say is honoured, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraph.models.config import ModelConfig
from kvgraph.models.encoder_decoder_config import EncoderDecoderConfig

T5 = {
    "model_type": "t5",
    "vocab_size": 97,
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 44,
    "num_layers": 2,
    "num_heads": 5,
    "relative_attention_num_buckets": 10,
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
    "dropout_rate": 0.1,
}
BART = {
    "model_type": "bart",
    "vocab_size": 97,
    "d_model": 30,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 36,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "max_position_embeddings": 64,
    "activation_function": "gelu",
    "is_encoder_decoder": True,
    "decoder_start_token_id": 2,
}
MARIAN = {**BART, "model_type": "marian", "scale_embedding": True, "static_position_embeddings": True}
MBART = {**BART, "model_type": "mbart"}
PEGASUS = {**BART, "model_type": "pegasus"}
M2M100 = {**BART, "model_type": "m2m_100"}
TRANSFORMER = {
    "model_type": "post_norm_encoder_decoder",
    "source_vocab_size": 97,
    "vocab_size": 97,
    "hidden_size": 30,
    "intermediate_size": 44,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-5,
    "attention_bias": True,
    "share_embeddings": True,
    "tie_word_embeddings": True,
}


def read(hf: dict[str, Any]) -> EncoderDecoderConfig:
    config = ModelConfig.from_hf(hf)
    assert isinstance(config, EncoderDecoderConfig)
    return config


@pytest.mark.parametrize(
    ("feed_forward_proj", "hidden_act", "gated"),
    [
        ("relu", "relu", False),
        ("gated-gelu", "gelu_new", True),
        ("gated-silu", "silu", True),
        ("gelu", "gelu", False),
    ],
)
def test_t5_spells_its_feed_forward_part_in_one_word(
    feed_forward_proj: str, hidden_act: str, gated: bool
) -> None:
    config = read({**T5, "feed_forward_proj": feed_forward_proj})
    assert (config.hidden_act, config.is_gated_act) == (hidden_act, gated)


@pytest.mark.parametrize(
    ("changes", "tied", "scaled"),
    [
        ({}, True, True),
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, False, False),
        # As transformers 5 writes version 1.1.
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False, False),
    ],
)
def test_t5_head_of_its_own_goes_with_logits_that_are_not_scaled(
    changes: dict[str, Any], tied: bool, scaled: bool
) -> None:
    config = read({**T5, **changes})
    assert (config.tie_word_embeddings, config.scale_decoder_outputs) == (tied, scaled)


def test_sides_have_their_own_sizes() -> None:
    config = read(BART)
    assert (config.encoder_layers, config.encoder_attention_heads, config.encoder_ffn_dim) == (3, 5, 44)
    assert (config.num_hidden_layers, config.num_attention_heads, config.intermediate_size) == (2, 3, 36)
    assert (config.encoder_head_dim, config.head_dim) == (6, 10)


def test_forced_tokens_are_read() -> None:
    config = read({**BART, "force_bos_token_to_be_generated": True, "forced_bos_token_id": 0})
    assert (config.forced_bos_token_id, config.forced_eos_token_id) == (0, 2)


def test_keys_of_published_configs_are_known() -> None:
    """Flan-T5, BART fine-tuned on CNN/Daily Mail, and an OPUS-MT translator."""
    flan = {
        "feed_forward_proj": "gated-gelu",
        "dense_act_fn": "gelu_new",
        "is_gated_act": True,
        "tie_word_embeddings": False,
        "num_decoder_layers": 3,
        "relative_attention_max_distance": 128,
        "n_positions": 512,
        "output_past": True,
        "initializer_factor": 1.0,
        "task_specific_params": {"summarization": {"num_beams": 4}},
    }
    assert read({**T5, **flan}).num_hidden_layers == 3
    old = {"_num_labels": 3, "add_bias_logits": False, "add_final_layer_norm": False, "output_past": True}
    old |= {"normalize_before": False, "encoder_layerdrop": 0.0, "init_std": 0.02, "num_hidden_layers": 3}
    cnn = {"normalize_embedding": True, "static_position_embeddings": False, "prefix": " "}
    cnn |= {"force_bos_token_to_be_generated": True, "forced_bos_token_id": 0, "no_repeat_ngram_size": 3}
    assert read({**BART, **old, **cnn}).forced_bos_token_id == 0
    opus = {"normalize_embedding": False, "static_position_embeddings": True, "bad_words_ids": [[96]]}
    opus |= {"decoder_vocab_size": 97, "share_encoder_decoder_embeddings": True, "num_beams": 6}
    assert read({**MARIAN, **old, **opus}).source_vocab_size == 97


def test_keys_of_published_configs_with_norms_before_the_parts_are_known() -> None:
    """mBART, Pegasus fine-tuned on XSum, and NLLB."""
    old = {"_num_labels": 3, "add_bias_logits": False, "add_final_layer_norm": True, "output_past": True}
    old |= {"normalize_before": True, "encoder_layerdrop": 0.0, "classif_dropout": 0.0, "max_length": 200}
    mbart = {"normalize_embedding": True, "static_position_embeddings": False, "extra_pos_embeddings": 2}
    assert read({**MBART, **old, **mbart, "scale_embedding": True}).embedding_scale == 30**0.5
    computed = {"normalize_embedding": False, "static_position_embeddings": True}
    xsum = {"extra_pos_embeddings": 1, "force_bos_token_to_be_generated": False, "length_penalty": 0.6}
    assert read({**PEGASUS, **old, **computed, **xsum}).eos_token_ids == (1,)
    nllb = read({**M2M100, **old, **computed, "pad_token_id": 5, "activation_function": "relu"})
    assert (nllb.pad_token_id, nllb.embedding_scale, nllb.forced_eos_token_id) == (5, 30**0.5, None)


@pytest.mark.parametrize(
    ("hf", "changes", "message"),
    [
        (T5, {"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj is 'gated-gelu-new'"),
        (T5, {"feed_forward_proj": "gated-silu", "dense_act_fn": "relu"}, "dense_act_fn is 'relu'"),
        (T5, {"feed_forward_proj": "relu", "is_gated_act": True}, "is_gated_act is True"),
        (T5, {"relative_attention_max_distance": 5}, "relative_attention_max_distance is 5"),
        (T5, {"is_encoder_decoder": False}, "is_encoder_decoder is False"),
        (T5, {"layer_norm_style": "rms"}, "layer_norm_style='rms'"),
        (BART, {"normalize_before": True}, "normalize_before is True"),
        (BART, {"normalize_embedding": False}, "normalize_embedding is False"),
        (BART, {"static_position_embeddings": True}, "static_position_embeddings is True"),
        (BART, {"extra_pos_embeddings": 0}, "extra_pos_embeddings is 0"),
        (MARIAN, {"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        (MBART, {"normalize_before": False}, "normalize_before is False"),
        (MBART, {"extra_pos_embeddings": 0}, "extra_pos_embeddings is 0"),
        (PEGASUS, {"static_position_embeddings": False}, "static_position_embeddings is False"),
        (PEGASUS, {"d_model": 15}, "d_model is 15, expected an even number"),
        (M2M100, {"normalize_embedding": True}, "normalize_embedding is True"),
        (M2M100, {"d_model": 2, "encoder_attention_heads": 1, "decoder_attention_heads": 1}, "d_model is 2"),
        (BART, {"encoder_attention_heads": 4}, "multiple of encoder_attention_heads 4"),
        (BART, {"num_hidden_layers": 4}, "num_hidden_layers is 4"),
        (BART, {"forced_eos_token_id": [2, 3]}, "forced_eos_token_id is"),
        (BART, {"gated": True}, "gated=True"),
        (MARIAN, {"static_position_embeddings": False}, "static_position_embeddings is False"),
        (MARIAN, {"normalize_before": True}, "normalize_before is True"),
        (MARIAN, {"decoder_vocab_size": 61}, "decoder_vocab_size is 61"),
        (MARIAN, {"d_model": 15}, "d_model is 15, expected an even number"),
        (TRANSFORMER, {"source_vocab_size": 61}, "source_vocab_size is 61"),
        (TRANSFORMER, {"head_bias": True}, "head_bias and tie_word_embeddings"),
        (TRANSFORMER, {"attention_bias": None}, "attention_bias is missing"),
        (TRANSFORMER, {"pre_norm": True}, "pre_norm=True"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    hf: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read({**hf, **changes})


@pytest.mark.parametrize(
    ("hf", "key"), [(T5, "feed_forward_proj"), (BART, "activation_function"), (TRANSFORMER, "hidden_act")]
)
def test_unknown_activation_is_refused(hf: dict[str, Any], key: str) -> None:
    import torch

    from kvgraph.models.family import family
    from kvgraph.models.layers import Precision

    config = read({**hf, key: "mish"})
    with torch.device("meta"), pytest.raises(ValueError, match="'mish' is not known; known are"):
        family(config.model_type).build(config, Precision(torch.float32, torch.float32))
