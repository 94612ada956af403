"""Decoders in the manner of Llama: one checkpoint each, with everything that the family has and Llama has not."""

from __future__ import annotations

from typing import Any

from family_cases.case import EPSILON, LENGTH, TRAINED, VOCABULARY, WINDOW, Case

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    "partial_rotary_factor": 0.75,
}
# Heads are no power of two, and a head is not hidden / heads.
SIX_BY_TWO = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
THREE_BY_ONE = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.3,
    "rms_norm_eps": EPSILON,
    "rope_parameters": DEFAULT,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    # Its class wants a hidden size that is a multiple of the heads.
    "llama": {**SIX_BY_TWO, "hidden_size": 24, "rope_parameters": LLAMA3},
    "cohere": {
        **SIX_BY_TWO,
        "logit_scale": 0.3,
        "layer_norm_eps": EPSILON,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {**SIX_BY_TWO, "sliding_window": WINDOW},
    "qwen2": {
        **THREE_BY_ONE,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {**SIX_BY_TWO, "rope_parameters": YARN},
    "gemma": {**THREE_BY_ONE, "tie_word_embeddings": True},
    "gemma2": {
        **SIX_BY_TWO,
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
        "tie_word_embeddings": True,
    },
    "gemma3_text": {
        **THREE_BY_ONE,
        "hidden_size": 21,
        "num_hidden_layers": 6,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 7,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
        "tie_word_embeddings": True,
    },
    "smollm3": {
        **SIX_BY_TWO,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    "granite": {
        **SIX_BY_TWO,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.11,
        "residual_multiplier": 0.22,
        "logits_scaling": 1.7,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": LLAMA3,
    },
    "olmo2": {**SIX_BY_TWO},
    "phi3": {
        **THREE_BY_ONE,
        # Its class sizes the factors of longrope by hidden / heads.
        "hidden_size": 48,
        "head_dim": 16,
        "sliding_window": 2 * TRAINED,
        "original_max_position_embeddings": TRAINED,
        "rope_parameters": LONGROPE,
    },
}


def without_rms(config: dict[str, Any]) -> dict[str, Any]:
    """A config of a family whose norms have another epsilon."""
    return {key: value for key, value in config.items() if key != "rms_norm_eps"}


VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Its language model alone.
GEMMA3 = {
    "text_config": {**COMMON, **FAMILIES["gemma3_text"]},
    "vision_config": VISION,
    "mm_tokens_per_image": 4,
}
CASES = [
    Case(name, without_rms({**COMMON, **config}) if name == "cohere" else {**COMMON, **config})
    for name, config in FAMILIES.items()
]
CASES.append(Case("gemma3", GEMMA3))
