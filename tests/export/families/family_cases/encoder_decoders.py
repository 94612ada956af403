"""T5, BART and their kin, and the variants that their checkpoints have."""

from __future__ import annotations

from family_cases.case import EPSILON, LENGTH, PADDING, VOCABULARY, Case

# Heads are no power of two, d_kv is not d_model / heads, and distances reach beyond the last bucket.
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 44,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 17,
    "layer_norm_epsilon": EPSILON,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 30,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 36,
    "encoder_attention_heads": 5,
    "decoder_attention_heads": 3,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 3,
    "init_std": 0.3,
}
MARIAN = {**BART, "decoder_start_token_id": 3, "eos_token_id": 0}
MBART = {**BART, "decoder_start_token_id": 5}
M2M100 = {**BART, "pad_token_id": PADDING}
CASES = [
    Case("t5", T5),
    # Version 1.1.
    Case(
        "t5, gated, a head of its own",
        {**T5, "feed_forward_proj": "gated-gelu"},
        exported=False,
        own_head=True,
    ),
    Case(
        "t5, gated silu, as deep",
        {**T5, "feed_forward_proj": "gated-silu", "num_decoder_layers": None},
        exported=False,
    ),
    Case("bart", BART),
    Case(
        "bart, scaled embedding, relu",
        {**BART, "scale_embedding": True, "activation_function": "relu"},
        exported=False,
    ),
    Case("bart, nothing tied", {**BART, "tie_word_embeddings": False}, exported=False),
    Case("mbart", MBART),
    Case(
        "mbart, scaled embedding, nothing tied",
        {**MBART, "scale_embedding": True, "tie_word_embeddings": False},
        exported=False,
    ),
    Case("pegasus", {**BART, "scale_embedding": True}),
    Case("m2m_100", M2M100),
    Case("m2m_100, nothing tied", {**M2M100, "tie_word_embeddings": False}, exported=False),
    Case(
        "marian",
        {**MARIAN, "scale_embedding": True, "activation_function": "swish"},
        exported=False,
    ),
    Case(
        "marian, two vocabularies",
        {**MARIAN, "decoder_vocab_size": 61, "share_encoder_decoder_embeddings": False},
    ),
]
