"""Decoders with layer norms, and the variants that their checkpoints have."""

from __future__ import annotations

from family_cases.case import EPSILON, LENGTH, VOCABULARY, Case

WINDOW = 9
# Some families end texts with a token that a vocabulary of this size does not have.
COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
# Heads are no power of two; two key/value heads or one where the family can.
SIX_BY_TEN = {**COMMON, "hidden_size": 60, "num_attention_heads": 6, "num_hidden_layers": 2}
NEOX = {
    **SIX_BY_TEN,
    "intermediate_size": 44,
    "max_position_embeddings": LENGTH,
    "rotary_pct": 0.4,
    "layer_norm_eps": EPSILON,
}
PHI = {
    **SIX_BY_TEN,
    "intermediate_size": 44,
    "max_position_embeddings": LENGTH,
    "partial_rotary_factor": 0.4,
    "layer_norm_eps": EPSILON,
}
STARCODER2 = {
    **COMMON,
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
    "norm_epsilon": EPSILON,
}
FALCON = {**SIX_BY_TEN, "max_position_embeddings": LENGTH, "layer_norm_epsilon": EPSILON}
GPT2 = {
    **COMMON,
    "n_embd": 30,
    "n_head": 3,
    "n_layer": 3,
    "n_positions": LENGTH,
    "layer_norm_epsilon": EPSILON,
}
BLOOM = {**COMMON, "hidden_size": 60, "n_head": 6, "n_layer": 2, "layer_norm_epsilon": EPSILON}
MPT = {**COMMON, "n_heads": 6, "n_layers": 2, "max_seq_len": LENGTH, "layer_norm_epsilon": EPSILON}
LINEAR_ROPE = {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0, "partial_rotary_factor": 0.6}
CASES = [
    Case("gpt2", GPT2),
    Case(
        "gpt2, separate head, scores by layer",
        {
            **GPT2,
            "n_inner": 44,
            "activation_function": "relu",
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
        },
        exported=False,
    ),
    Case("gpt2, scores as they are", {**GPT2, "scale_attn_weights": False}, exported=False),
    Case("gpt_neox", NEOX),
    Case(
        "gpt_neox, sequential, tied, no attention bias",
        {**NEOX, "use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False},
        exported=False,
    ),
    Case("gpt_neox, linear rope", {**NEOX, "rope_parameters": LINEAR_ROPE}, exported=False),
    Case("phi, normed heads", {**PHI, "num_key_value_heads": 1, "qk_layernorm": True}),
    Case("phi, two key/value heads", {**PHI, "num_key_value_heads": 2}, exported=False),
    Case("starcoder2", {**STARCODER2, "sliding_window": WINDOW}),
    Case(
        "starcoder2, one key/value head, no bias, separate head",
        {**STARCODER2, "num_key_value_heads": 1, "use_bias": False, "tie_word_embeddings": False},
        exported=False,
    ),
    Case("falcon, one key/value head", FALCON),
    Case(
        "falcon, new decoder",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 44},
        exported=False,
    ),
    Case(
        "falcon, new decoder with one norm",
        {
            **FALCON,
            "num_kv_heads": 3,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
            "tie_word_embeddings": False,
        },
        exported=False,
    ),
    Case(
        "falcon, ALiBi",
        {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        exported=False,
    ),
    Case("falcon, ALiBi over one key/value head", {**FALCON, "alibi": True}),
    Case("bloom", BLOOM),
    Case("mpt", {**MPT, "d_model": 60}),
    Case(
        "mpt, clipped",
        {
            **MPT,
            "d_model": 30,
            "tie_word_embeddings": False,
            "attn_config": {"clip_qkv": 0.8, "softmax_scale": 0.7},
        },
        exported=False,
    ),
]
