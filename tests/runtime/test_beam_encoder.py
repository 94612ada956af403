"""Beams over an encoder's sources, against `transformers`: every beam of a source reads the same cross tensors."""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from kvgraph.export.torch_encoder_session import open_torch_session
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.open import open_session

START, PAD, SCORE_TOLERANCE = 3, 0, 1e-5
SOURCES = [[5, 6, 7, 8, 90, 11, 12], [40], [60, 1, 17]]
SIZES = {
    "t5": {"d_model": 20, "d_kv": 6, "d_ff": 44, "num_layers": 2, "num_heads": 5},
    "bart": {
        "d_model": 30,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 44,
        "decoder_ffn_dim": 36,
        "encoder_attention_heads": 5,
        "decoder_attention_heads": 3,
        "max_position_embeddings": 64,
        "init_std": 0.3,
    },
}


class Sourced:
    """A session whose caches read given sources, several rows each."""

    def __init__(self, session, sources):
        self.session, self.contract = session, session.contract
        self.prefill, self.decode = session.prefill, session.decode
        lengths = np.array([len(source) for source in sources])
        padded = np.array([source + [PAD] * (lengths.max() - len(source)) for source in sources])
        self.encoded = session.encode(padded, lengths)

    def allocate_cache(self, batch_size, limit=None):
        cache = self.session.allocate_cache(batch_size, limit)
        rows = np.repeat(np.arange(len(SOURCES)), batch_size // len(SOURCES))
        self.session.attach(cache, self.encoded, rows)
        return cache


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory):
    @functools.cache
    def make(model_type):
        torch.manual_seed(7)
        tokens = {"vocab_size": 97, "decoder_start_token_id": START, "pad_token_id": PAD, "eos_token_id": 2}
        config = AutoConfig.for_model(model_type, **SIZES[model_type], **tokens)
        path = tmp_path_factory.mktemp(model_type)
        AutoModelForSeq2SeqLM.from_config(config).save_pretrained(path)
        return path

    return make


@pytest.mark.parametrize(("model_type", "runtime"), [("t5", "torch"), ("bart", "torch"), ("t5", "ort")])
def test_texts_are_those_of_transformers(make_checkpoint, exported, model_type, runtime):
    checkpoint = make_checkpoint(model_type)
    session = (
        open_torch_session(open_checkpoint(checkpoint))
        if runtime == "torch"
        else open_session(exported(checkpoint))
    )
    oracle = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    width = max(map(len, SOURCES))
    ids = torch.tensor([source + [PAD] * (width - len(source)) for source in SOURCES])
    mask = torch.tensor([[1] * len(source) + [0] * (width - len(source)) for source in SOURCES])
    for eos, length_penalty, early_stopping in (
        ((), 1.0, False),
        ((2, 30, 64), 1.0, True),
        ((2, 7, 30, 64), 2.0, "never"),
        (tuple(range(4, 20)), -1.0, False),
    ):
        options = {"num_beams": 3, "length_penalty": length_penalty, "early_stopping": early_stopping}
        expected = oracle.generate(
            ids,
            attention_mask=mask,
            eos_token_id=list(eos) or None,
            forced_eos_token_id=None,
            max_new_tokens=12,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
        params = GenerationParams(max_new_tokens=12, eos_token_ids=eos, **options)
        found = generate(Sourced(session, SOURCES), [[START]] * len(SOURCES), params)
        for row, generation in enumerate(found):
            tokens = expected.sequences[row, 1:].tolist()
            end = next((place + 1 for place, token in enumerate(tokens) if token in eos), len(tokens))
            assert list(generation.token_ids) == tokens[:end], (row, options)
            assert generation.score == pytest.approx(
                float(expected.sequences_scores[row]), rel=SCORE_TOLERANCE
            )
