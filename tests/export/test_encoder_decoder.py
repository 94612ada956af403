"""T5, BART and their kin against transformers: in eager torch, on ONNX Runtime, and built in TensorRT-RTX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GenerationConfig, PreTrainedModel

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import (
    CONTEXT_LENGTH,
    GraphName,
    cross_key,
    cross_value,
    past_key,
    past_value,
)
from kvgraph.export.passes.slice_cache import slice_cache
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.torch_encoder_session import open_torch_session
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.encoder_session import EncoderSession
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.open import open_session
from kvgraph.runtime.session import Cache, Floats, Ids
from kvgraph.runtime.sources import SourcedSession, encode_sources
from kvgraph.runtime.token_rules import TokenRules

# float32 sums in another order, on logits of up to 12.
TOLERANCE = 1e-4
# float16 keeps 11 bits of every product's result.
FLOAT16_TOLERANCE = 0.1
LENGTH, VOCABULARY, PADDING = 64, 97, 7
# Of sources that are padded together; the longest is longer than T5's largest distance below.
SOURCE_LENGTHS = (23, 1, 9)


class Case(NamedTuple):
    """A tiny checkpoint: its family and config, and whether it is also exported, which takes seconds."""

    model_type: str
    config: dict[str, Any]
    exported: bool = False
    own_head: bool = False


# Heads are no power of two, d_kv is not d_model / heads, and distances reach beyond the last bucket.
T5 = {
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 44,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 5,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 17,
    "layer_norm_epsilon": 0.03,
    "decoder_start_token_id": 0,
}
BART = {
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
# Heads of either side have one size in these classes' configs, and there is a padding token that texts do not hold.
MBART = {**BART, "decoder_start_token_id": 5}
M2M100 = {**BART, "pad_token_id": PADDING}
CASES = {
    "t5": Case("t5", T5, exported=True),
    "t5 v1.1, gated, a head of its own": Case(
        "t5", {**T5, "feed_forward_proj": "gated-gelu"}, exported=True, own_head=True
    ),
    "t5, gated silu, as deep": Case(
        "t5", {**T5, "feed_forward_proj": "gated-silu", "num_decoder_layers": None}
    ),
    "bart": Case("bart", BART, exported=True),
    "bart, scaled embedding, relu": Case(
        "bart", {**BART, "scale_embedding": True, "activation_function": "relu"}
    ),
    "bart, nothing tied": Case("bart", {**BART, "tie_word_embeddings": False}),
    "mbart": Case("mbart", MBART, exported=True),
    "mbart, scaled embedding, nothing tied": Case(
        "mbart", {**MBART, "scale_embedding": True, "tie_word_embeddings": False}
    ),
    "pegasus": Case("pegasus", {**BART, "scale_embedding": True}, exported=True),
    "m2m_100": Case("m2m_100", M2M100, exported=True),
    "m2m_100, nothing tied": Case("m2m_100", {**M2M100, "tie_word_embeddings": False}),
    "marian": Case("marian", {**MARIAN, "scale_embedding": True, "activation_function": "swish"}),
    "marian, two vocabularies": Case(
        "marian",
        {**MARIAN, "decoder_vocab_size": 61, "share_encoder_decoder_embeddings": False},
        exported=True,
    ),
}
EXPORTED = [name for name, case in CASES.items() if case.exported]
# Prompts in chunks, then one token at a time.
SPLITS = {
    "prefill alone": [LENGTH],
    "decode alone": [1] * LENGTH,
    "short prompt": [3] + [1] * (LENGTH - 3),
    "four chunks": [16, 16, 16, 16],
    "uneven chunks, then decode": [9, 7, 30] + [1] * (LENGTH - 46),
}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a case, with weights large enough for every part to matter."""

    @functools.cache
    def make(name: str) -> Path:
        torch.manual_seed(7)
        case = CASES[name]
        config = AutoConfig.for_model(case.model_type, vocab_size=VOCABULARY, **case.config)
        model = AutoModelForSeq2SeqLM.from_config(config)
        for parameter in model.parameters():
            # Norm weights and biases, which transformers leaves at one and zero.
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
        path = tmp_path_factory.mktemp(case.model_type)
        model.save_pretrained(path)
        if case.own_head:
            give_own_head(path)
        return path

    return make


def give_own_head(path: Path) -> None:
    """What a T5 v1.1 checkpoint says, and transformers 5 does not write: a head beside the table."""
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = 0.3 * torch.randn_like(weights["shared.weight"])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    text = (path / "config.json").read_text()
    text = text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (path / "config.json").write_text(text.replace('"scale_decoder_outputs": true,', ""))


@pytest.fixture
def checkpoint(name: str, make_checkpoint: Callable[[str], Path]) -> Path:
    return make_checkpoint(name)


@functools.cache
def reference(checkpoint: Path) -> PreTrainedModel:
    model = AutoModelForSeq2SeqLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval().requires_grad_(False)


@functools.cache
def torch_session(checkpoint: Path) -> EncoderSession:
    return open_torch_session(open_checkpoint(checkpoint))


@functools.cache
def ort_session(path: Path) -> EncoderSession:
    return open_session(Bundle.open(path), threads=1)


@pytest.fixture
def session(name: str, runtime: str, checkpoint: Path, exported: Callable[..., Bundle]) -> EncoderSession:
    return torch_session(checkpoint) if runtime == "torch" else ort_session(exported(checkpoint).path)


BOTH_RUNTIMES = [
    pytest.param(name, runtime, id=f"{name}-{runtime}")
    for name, case in CASES.items()
    for runtime in (("torch", "ort") if case.exported else ("torch",))
]


def sources(session: EncoderSession) -> tuple[Ids, Ids]:
    """Three sources of unequal length, with padding that is no padding token."""
    assert session.contract.encoder is not None
    vocab_size = session.contract.encoder.vocab_size
    ids = np.random.default_rng(3).integers(0, vocab_size, (len(SOURCE_LENGTHS), max(SOURCE_LENGTHS)))
    return without_padding(ids), np.array(SOURCE_LENGTHS)


def without_padding(ids: Ids) -> Ids:
    """M2M100 gives a padding token within a text no position."""
    return np.where(ids == PADDING, PADDING + 1, ids)


def new_cache(session: EncoderSession, limit: int = LENGTH) -> Cache:
    """A cache whose three rows read the sources."""
    cache = session.allocate_cache(len(SOURCE_LENGTHS), limit)
    session.attach(cache, session.encode(*sources(session)))
    return cache


def expected(checkpoint: Path, session: EncoderSession, targets: Ids) -> Any:
    """What transformers makes of the sources and of decoder tokens [3, n]."""
    ids, lengths = sources(session)
    mask = np.arange(ids.shape[1]) < lengths[:, None]
    return reference(checkpoint)(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
        decoder_input_ids=torch.from_numpy(targets),
        use_cache=True,
    )


def target_ids(session: EncoderSession) -> Ids:
    return without_padding(np.random.default_rng(5).integers(0, session.contract.vocab_size, (3, LENGTH)))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("name", "runtime"), BOTH_RUNTIMES)
def test_every_split_equals_transformers(
    checkpoint: Path, session: EncoderSession, split: str, teacher_forced: Callable[..., Floats]
) -> None:
    ids = target_ids(session)
    found = teacher_forced(session, ids, SPLITS[split], new_cache(session))
    logits = expected(checkpoint, session, ids).logits.numpy()
    np.testing.assert_allclose(found, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sizes", [[LENGTH], [20] + [1] * (LENGTH - 20)], ids=["prefill", "decode"])
@pytest.mark.parametrize(("name", "runtime"), BOTH_RUNTIMES)
def test_caches_equal_those_of_transformers(
    checkpoint: Path,
    session: EncoderSession,
    sizes: Sequence[int],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids, cache = target_ids(session), new_cache(session)
    encoded = session.encode(*sources(session))
    teacher_forced(session, ids, sizes, cache)
    pair = expected(checkpoint, session, ids).past_key_values
    for layer in range(session.contract.num_layers):
        own, cross = pair.self_attention_cache.layers[layer], pair.cross_attention_cache.layers[layer]
        for name, array in ((past_key(layer), own.keys), (past_value(layer), own.values)):
            np.testing.assert_allclose(cache.read(name)[:, :, :LENGTH], array, atol=TOLERANCE, rtol=0)
        for name, array in ((cross_key(layer), cross.keys), (cross_value(layer), cross.values)):
            for row, length in enumerate(SOURCE_LENGTHS):
                found, right = encoded.read(name)[row, :, :length], array[row, :, :length]
                np.testing.assert_allclose(found, right, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "runtime"), BOTH_RUNTIMES)
def test_rows_of_unequal_length_equal_runs_of_their_own(checkpoint: Path, session: EncoderSession) -> None:
    lengths, decoded, ids = np.array([1, 17, 3]), 6, target_ids(session)
    cache, longest = new_cache(session), int(lengths.max())
    padded = np.where(np.arange(longest) < lengths[:, None], ids[:, :longest], 0)
    steps = [session.prefill(cache, padded, np.zeros(3, np.int64), lengths[:, None] - 1, lengths).copy()]
    for step in range(decoded):
        chosen = np.take_along_axis(ids, (lengths + step)[:, None], 1)
        steps.append(session.decode(cache, chosen, lengths + step).copy())
    found = np.concatenate(steps, axis=1)
    logits = expected(checkpoint, session, ids).logits.numpy()
    for row, length in enumerate(lengths):
        right = logits[row, length - 1 : length + decoded]
        np.testing.assert_allclose(found[row], right, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("forced", [{}, {"forced_bos_token_id": 50, "forced_eos_token_id": 2}], ids=str)
@pytest.mark.parametrize("name", ["mbart", "pegasus", "m2m_100"])
def test_texts_equal_those_of_transformers(checkpoint: Path, forced: dict[str, int], num_beams: int) -> None:
    session, config = torch_session(checkpoint), reference(checkpoint).config
    ids, lengths = sources(session)
    rows = [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
    start, end = config.decoder_start_token_id, config.eos_token_id
    settings = GenerationConfig(
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=config.pad_token_id, **forced
    )
    written = reference(checkpoint).generate(
        torch.from_numpy(ids),
        attention_mask=torch.from_numpy((np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)),
        generation_config=settings,
        max_new_tokens=12,
        num_beams=num_beams,
        do_sample=False,
    )
    # transformers takes what is not said from the config.
    last = forced.get("forced_eos_token_id", getattr(config, "forced_eos_token_id", None))
    rules = TokenRules(first=forced.get("forced_bos_token_id"), last=last)
    params = GenerationParams(max_new_tokens=12, num_beams=num_beams, eos_token_ids=(end,), rules=rules)
    sourced = SourcedSession(session, encode_sources(session, rows))
    found = generate(sourced, [[start]] * len(rows), params)
    for text, row in zip(found, written[:, 1:].tolist(), strict=True):
        right = row[: row.index(end) + 1] if end in row else row
        assert list(text.token_ids) == right


@pytest.mark.parametrize(("name", "runtime"), BOTH_RUNTIMES)
def test_rows_may_share_a_source(session: EncoderSession, teacher_forced: Callable[..., Floats]) -> None:
    ids, encoded = target_ids(session)[:, :8], session.encode(*sources(session))
    alone = teacher_forced(session, ids, [3, 1, 4], new_cache(session))
    cache, rows = session.allocate_cache(5, 8), np.array([2, 0, 2, 1, 1])
    session.attach(cache, encoded, rows)
    found = teacher_forced(session, ids[rows], [3, 1, 4], cache)
    np.testing.assert_allclose(found, alone[rows], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "runtime"), [("t5", "torch"), ("t5", "ort")])
def test_a_cache_without_sources_takes_part_in_no_step(session: EncoderSession) -> None:
    ids, past = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="no sources; call encode, then attach"):
        session.decode(session.allocate_cache(1), ids, past)


@pytest.mark.parametrize(("name", "runtime"), [("t5", "torch"), ("t5", "ort")])
@pytest.mark.parametrize(
    ("rows", "message"),
    [(None, "3 sources and 2 rows"), ([0, 3], "0 <= row < 3"), ([0], "1 rows, the cache has 2")],
)
def test_sources_that_do_not_fit_the_rows_are_refused(
    session: EncoderSession, rows: list[int] | None, message: str
) -> None:
    encoded = session.encode(*sources(session))
    with pytest.raises(ValueError, match=message):
        session.attach(session.allocate_cache(2), encoded, None if rows is None else np.array(rows))


@pytest.mark.parametrize("residual_dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_float16_stays_near_float32(
    checkpoint: Path, residual_dtype: str, teacher_forced: Callable[..., Floats]
) -> None:
    session = open_torch_session(open_checkpoint(checkpoint), "float16", residual_dtype)
    ids = target_ids(session)
    found = teacher_forced(session, ids, [20, LENGTH - 20], new_cache(session))
    logits = expected(checkpoint, session, ids).logits.numpy()
    np.testing.assert_allclose(found, logits, atol=FLOAT16_TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", EXPORTED)
def test_graphs_hold_standard_operators_of_opset_24(
    checkpoint: Path, exported: Callable[..., Bundle]
) -> None:
    bundle = exported(checkpoint)
    assert bundle.contract.graphs == ("encode", "prefill", "decode")
    for graph in bundle.contract.graphs:
        path = bundle.graph_path(graph)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 24)}
        assert {node.domain for node in model.graph.node} == {""}
        assert not {"If", "Loop"} & {node.op_type for node in model.graph.node}


@pytest.mark.parametrize("graph", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_tensorrt_cuts_the_cache_to_the_context_and_leaves_the_source_whole(
    checkpoint: Path, exported: Callable[..., Bundle], graph: GraphName
) -> None:
    bundle = exported(checkpoint)
    model = ir.from_proto(onnx.load(bundle.graph_path(graph), load_external_data=False))
    assert slice_cache(model, bundle.contract)
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    cross = [node for node in attentions if node.inputs[1].name.startswith("cross.")]
    assert len(cross) * 2 == len(attentions)
    for node in attentions:
        # What follows the context length is cut: keys by Slice, masks by having asked for it.
        key_is_cut = node.inputs[1].producer() is not None
        assert key_is_cut == (node not in cross)
        assert follows(node.inputs[3], CONTEXT_LENGTH) == (node not in cross)


def follows(value: ir.Value, name: str) -> bool:
    """Whether a value depends on the input `name`."""
    if value.name == name:
        return True
    producer = value.producer()
    inputs = () if producer is None else producer.inputs
    return any(entry is not None and follows(entry, name) for entry in inputs)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_float16_graphs_stay_near_float32_and_build_in_tensorrt_rtx(
    checkpoint: Path, exported: Callable[..., Bundle], teacher_forced: Callable[..., Floats]
) -> None:
    bundle = exported(checkpoint, dtype="float16")
    session = ort_session(bundle.path)
    ids = target_ids(session)
    found = teacher_forced(session, ids, [20] + [1] * (LENGTH - 20), new_cache(session))
    logits = expected(checkpoint, session, ids).logits.numpy()
    np.testing.assert_allclose(found, logits, atol=FLOAT16_TOLERANCE, rtol=0)
    options = TensorRTOptions(max_batch=2, max_context=LENGTH, compute_capabilities=(89,))
    target = build_tensorrt(bundle, "tensorrt-rtx", options)
    assert target.compute_capabilities == (89,)
    assert set(target.graphs) == {"encode", "prefill", "decode"}
