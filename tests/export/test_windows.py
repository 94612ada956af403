"""Sliding windows against transformers, on both sides of the window's length; in eager torch, which needs no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.session import Floats, Ids

# float32 sums in another order, on logits of up to 8.
TOLERANCE = 1e-4
# A mask that hides or shows one key too many moves the logits by more.
VISIBLE = 1e-2
WINDOW = 4
FULL, SLIDING = "full_attention", "sliding_attention"

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("mistral", {"sliding_window": WINDOW}),
    "no window": ("mistral", {"sliding_window": None}),
    "longer than any text": ("mistral", {"sliding_window": 1000}),
    "one token": ("mistral", {"sliding_window": 1}),
    "from a layer upwards": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "num_hidden_layers": 3,
        },
    ),
    "switched off": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 0},
    ),
    "by layer type": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "layers without positions": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "no_rope_layers": [1, 0],
        },
    ),
    "by layer type, with positions and without": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, SLIDING, FULL, FULL],
        },
    ),
    "capped, first and third layer": ("gemma2", {"sliding_window": WINDOW, "num_hidden_layers": 3}),
    "five of six layers": (
        "gemma3_text",
        {
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}},
        },
    ),
    "fused projections": ("phi3", {"sliding_window": WINDOW, "hidden_size": 32, "pad_token_id": 0}),
}


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
@pytest.mark.parametrize("name", MODELS)
def test_windows_equal_those_of_transformers(
    name: str,
    length: int,
    tiny_checkpoint: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    model_type, changes = MODELS[name]
    checkpoint, ids = tiny_checkpoint(model_type, **changes), random_ids(1, length)
    session = TorchSession.open(open_checkpoint(checkpoint))
    expected = reference_logits(checkpoint, ids)
    for sizes in ([length], [1] * length, [2] + [1] * (length - 2)):
        found = teacher_forced(session, ids, sizes)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_a_window_counts_the_current_token(
    tiny_checkpoint: Callable[..., Path],
    random_ids: Callable[..., Ids],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids = random_ids(1, WINDOW + 1)
    logits = [
        teacher_forced(TorchSession.open(open_checkpoint(checkpoint)), ids, [WINDOW + 1])
        for checkpoint in (
            tiny_checkpoint("mistral", sliding_window=window, num_hidden_layers=1)
            for window in (WINDOW, None)
        )
    ]
    difference = np.abs(logits[0] - logits[1]).max(axis=(0, 2))
    np.testing.assert_array_equal(difference > VISIBLE, [False] * WINDOW + [True])
