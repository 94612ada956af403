"""Every rope type in a whole model against transformers, on both sides of the trained length; eager torch."""

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
TRAINED, LONGEST = 16, 80
POSITIONS = (1, TRAINED - 1, TRAINED, TRAINED + 1, 4 * TRAINED)

SHORT, LONG = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 4.0, 8.0]
ORIGINAL = {"original_max_position_embeddings": TRAINED}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 5.0},
    "dynamic": {"rope_type": "dynamic", "factor": 5.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, **ORIGINAL},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **ORIGINAL},
}
# Types that leave max_position_embeddings at the trained length.
SHORT_CONFIGS = ("linear", "dynamic")
PHI3 = {"hidden_size": 64, "head_dim": 16, "original_max_position_embeddings": TRAINED}


def compare(
    checkpoint: Path,
    position: int,
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    """Prefill up to `position`, and decode at it."""
    session, ids = TorchSession.open(open_checkpoint(checkpoint)), random_ids(1, position + 1)
    for sizes in ([position + 1], [position, 1]):
        expected = reference_logits(checkpoint, ids, sizes)
        np.testing.assert_allclose(teacher_forced(session, ids, sizes), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", ROPES)
def test_rope_equals_that_of_transformers(
    name: str,
    position: int,
    tiny_llama: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    checkpoint = tiny_llama(
        rope_parameters={**ROPES[name], "rope_theta": 10000.0},
        max_position_embeddings=TRAINED if name in SHORT_CONFIGS else LONGEST,
    )
    compare(checkpoint, position, random_ids, reference_logits, teacher_forced)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_partial_rotation_equals_that_of_transformers(
    factor: float,
    position: int,
    tiny_checkpoint: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    checkpoint = tiny_checkpoint("phi3", **PHI3, rope_parameters=rope, max_position_embeddings=LONGEST)
    compare(checkpoint, position, random_ids, reference_logits, teacher_forced)


def test_a_sequence_that_crosses_the_trained_length_keeps_its_keys_as_they_were_turned(
    tiny_llama: Callable[..., Path],
    random_ids: Callable[..., Ids],
    reference_logits: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
) -> None:
    checkpoint = tiny_llama(
        rope_parameters={**ROPES["longrope"], "rope_theta": 10000.0}, max_position_embeddings=LONGEST
    )
    session, ids = TorchSession.open(open_checkpoint(checkpoint)), random_ids(1, 40)
    sizes = [TRAINED - 3] + [1] * (43 - TRAINED)
    crossing = teacher_forced(session, ids, sizes)
    np.testing.assert_allclose(crossing, reference_logits(checkpoint, ids, sizes), atol=TOLERANCE, rtol=0)
    # A prompt of that length is turned by the long table from its first token on: another result.
    assert np.abs(crossing - teacher_forced(session, ids, [40])).max() > 100 * TOLERANCE
