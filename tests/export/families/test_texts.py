"""Greedy texts and beams of encoder-decoder models against those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from family_cases.case import Case
from family_cases.references import SOURCE_LENGTHS, load, source_ids
from transformers import GenerationConfig

from kvgraph.runtime.encoder_session import EncoderSession
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.sources import SourcedSession, encode_sources
from kvgraph.runtime.token_rules import TokenRules


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("forced", [{}, {"forced_bos_token_id": 50, "forced_eos_token_id": 2}], ids=str)
@pytest.mark.parametrize("name", ["mbart", "pegasus", "m2m_100"])
def test_texts_equal_those_of_transformers(
    case: Case,
    checkpoint: Path,
    open_torch: Callable[[Path], EncoderSession],
    forced: dict[str, int],
    num_beams: int,
) -> None:
    reference, ids = load(checkpoint, torch.float32), source_ids(case)
    config = reference.config
    start, end = config.decoder_start_token_id, config.eos_token_id
    settings = GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=config.pad_token_id, **forced
    )
    written = reference.generate(
        torch.from_numpy(ids),
        attention_mask=torch.from_numpy((np.arange(ids.shape[1]) < SOURCE_LENGTHS[:, None]).astype(np.int64)),
        generation_config=settings,
        max_new_tokens=12,
        num_beams=num_beams,
        do_sample=False,
    )
    # transformers takes what is not said from the config.
    last = forced.get("forced_eos_token_id", getattr(config, "forced_eos_token_id", None))
    rules = TokenRules(first=forced.get("forced_bos_token_id"), last=last)
    params = GenerationParams(max_new_tokens=12, num_beams=num_beams, eos_token_ids=(end,), rules=rules)
    rows = [row[:length].tolist() for row, length in zip(ids, SOURCE_LENGTHS, strict=True)]
    sourced = SourcedSession(open_torch(checkpoint), encode_sources(open_torch(checkpoint), rows))
    found = generate(sourced, [[start]] * len(rows), params)
    for text, row in zip(found, written[:, 1:].tolist(), strict=True):
        assert list(text.token_ids) == (row[: row.index(end) + 1] if end in row else row)
