"""What the configs of decoders in the manner of Llama must say, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgraph.models.config import ModelConfig
from kvgraph.models.family import family
from kvgraph.models.layers import Precision

FULL, SLIDING = "full_attention", "sliding_attention"
MODEL_TYPES = (
    "cohere",
    "gemma",
    "gemma2",
    "gemma3_text",
    "granite",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)

Published = Callable[..., dict[str, Any]]

# Keys whose absence is an error, beside those that `read_common` asks for.
REQUIRED = {
    "cohere": ("layer_norm_eps", "logit_scale", "rope_theta"),
    "mistral": ("sliding_window", "rope_theta", "rms_norm_eps", "hidden_act"),
    "qwen2": ("rope_theta", "rms_norm_eps", "hidden_act"),
    "qwen3": ("head_dim", "rope_theta"),
    "gemma": ("head_dim", "hidden_act", "rope_theta"),
    "gemma2": ("head_dim", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    "gemma3_text": ("head_dim", "query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"),
    "smollm3": ("rope_theta",),
    "granite": ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"),
    "olmo2": ("rope_theta", "rms_norm_eps"),
    "phi3": ("sliding_window", "rope_theta"),
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("cohere", {"use_qk_norm": True}, "use_qk_norm is True, expected False"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0, expected an integer of at least 1"),
    ("mistral", {"sliding_window": -1}, "sliding_window is -1, expected an integer"),
    ("mistral", {"layer_types": [FULL] * 7}, "layer_types=.* not implemented for model_type 'mistral'"),
    ("mistral", {"attention_bias": True}, "attention_bias=True may change"),
    ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 may change"),
    ("mistral", {"rope_scaling": {"type": "mystery"}}, "rope_type 'mystery' is not implemented; known: def"),
    ("qwen2", {"layer_types": [FULL] * 3}, "expected a list of 7 values"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 7}, "layer_types holds 'chunked_attention'; known: f"),
    ("qwen2", {"layer_types": [SLIDING] * 7}, "layer 0 is of type 'sliding_attention', but no sliding_wi"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": ...}, "max_window_layers is missing"),
    ("qwen3", {"use_sliding_window": 1}, "use_sliding_window is 1, expected true or false"),
    ("gemma", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', expected 'gelu_pytorch_tanh'"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True may change"),
    ("gemma2", {"hidden_act": "gelu"}, "hidden_act is 'gelu' but hidden_activation is 'gelu_pytorch_tanh'"),
    ("gemma2", {"sliding_window": None, "sliding_window_size": None}, "no sliding_window is in use"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0, expected a finite number above"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 may change"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True may change"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "expected parameters for full_attention and sliding_attention each",
    ),
    (
        "gemma3_text",
        {"rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: {"rope_theta": 1e4}}},
        "rope_theta is 1000000.0 but 500000.0 among the rope parameters",
    ),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1, 1, 2]}, "no_rope_layers holds 2; known: 0, 1"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is .*, expected a list of 7 values"),
    ("smollm3", {"no_rope_layers": ..., "no_rope_layer_interval": ...}, "no_rope_layer_interval is missing"),
    ("granite", {"logits_scaling": 0}, "logits_scaling is 0, expected a finite number above 0"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0 may change"),
    ("phi3", {"rope_scaling": {"type": "yarn"}}, "'yarn' is not implemented for model_type 'phi3'"),
    ("phi3", {"attention_bias": True}, "attention_bias is True, expected False"),
    ("phi3", {"interpolate_factor": 2}, "interpolate_factor is 2, expected 1"),
    ("phi3", {"auto_map": {"AutoConfig": "other.Config"}}, "AutoConfig is 'other.Config', expected Phi-3's"),
    ("phi3", {"auto_map": {"AutoModel": "modeling_phi3.X"}}, "names code for AutoModel, which is never run"),
]
UNKNOWN = {"a_feature_of_tomorrow": 1, "num_experts": 8, "quantization_config": {"bits": 4}}


def read(hf: dict[str, Any]) -> Any:
    """What the family makes of a config.json: a class of its own, beyond `ModelConfig`."""
    return ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("model_type", "key"), [(name, key) for name, keys in REQUIRED.items() for key in keys]
)
def test_a_key_that_changes_numbers_is_not_guessed(
    model_type: str, key: str, published_rms: Published
) -> None:
    with pytest.raises(ValueError, match=rf"{key}.* is missing"):
        read(published_rms(model_type, **{key: ...}))


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str, published_rms: Published
) -> None:
    with pytest.raises(ValueError, match=message):
        read(published_rms(model_type, **changes))


@pytest.mark.parametrize("key", UNKNOWN)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_unknown_key_is_refused_by_every_family(
    model_type: str, key: str, published_rms: Published
) -> None:
    with pytest.raises(ValueError, match=key):
        read(published_rms(model_type, **{key: UNKNOWN[key]}))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_unknown_activation_is_refused_by_name(model_type: str, published_rms: Published) -> None:
    names = ("hidden_act", "hidden_activation")
    present = [name for name in names if name in published_rms(model_type)]
    config = read(published_rms(model_type, **dict.fromkeys(present, "gelu_of_tomorrow")))
    with pytest.raises(ValueError, match="hidden_act 'gelu_of_tomorrow' is not known; known are"):
        family(model_type).build(config, Precision(torch.float32, torch.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config is None, expected an object"),
        ({"audio_config": {"hidden_size": 8}}, "audio_config="),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
    ],
)
def test_what_gemma3_does_not_honour_is_refused_by_name(
    changes: dict[str, Any], message: str, published_rms: Published
) -> None:
    whole = {"model_type": "gemma3", "text_config": published_rms("gemma3_text"), "vision_config": {}}
    assert read(whole).model_type == "gemma3"
    with pytest.raises(ValueError, match=message):
        read({**whole, **changes})
