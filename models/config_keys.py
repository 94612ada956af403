"""Keys of config.json that no family has to read, and keys whose refusal needs an explanation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys without influence on the logits.
HARMLESS_KEYS = frozenset(
    {
        # Bookkeeping of the libraries that write config.json.
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_flash_attn_2_enabled",
        "_from_model_config",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "cache_implementation",
        "is_llama_config",
        "model_type",
        "name_or_path",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        # Training, classification heads and the form of a library call's result.
        "attention_dropout",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "finetuning_task",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "label2id",
        "neftune_noise_alpha",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_last_hidden_states",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        # The same sums in another order.
        "chunk_size_feed_forward",
        "pretraining_tp",
        # Decoder-only models ignore these.
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "is_decoder",
        "max_sequence_length",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        # Old files carry generation settings; generation_config.json replaced them.
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "max_new_tokens",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    }
)

# Features that are off at this value; a family that implements one reads the key itself.
OFF_VALUES: Mapping[str, Any] = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
}

# Keys whose refusal needs more than their name.
REFUSALS: Mapping[str, str] = {
    "quantization_config": "the checkpoint is already quantized; give the float checkpoint and use kvgraph quantize",
    "auto_map": "the checkpoint brings its own modelling code, which is never run",
}
