"""Mixtures of experts: a checkpoint for every way to choose and to weight experts.

The scores of the last expert chosen and of the first one left out are never so close here that float32 sums in another
order would choose otherwise.
"""

from __future__ import annotations

from typing import Any

from family_cases.case import WINDOW, Case
from family_cases.llama_like import COMMON, SIX_BY_TWO, THREE_BY_ONE, YARN

# The grouped product that transformers uses takes rows of whole 16 bytes.
EXPERT_SIZE = 12
# So few of the experts are chosen that prefill groups tokens by expert.
GROUPED = "qwen3_moe, few of many, raw weights, some layers without, window"
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        **SIX_BY_TWO,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
    },
    "qwen3_moe": {
        **SIX_BY_TWO,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": True,
        "attention_bias": True,
        "rope_parameters": YARN,
    },
    GROUPED: {
        **THREE_BY_ONE,
        "num_hidden_layers": 5,
        "num_experts": 17,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "qwen2_moe": {
        **THREE_BY_ONE,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": EXPERT_SIZE,
        "shared_expert_intermediate_size": 11,
        "norm_topk_prob": False,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
}
CASES = [Case(name, {**COMMON, **config}) for name, config in CHECKPOINTS.items()]
