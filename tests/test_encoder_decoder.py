"""A bundle with an encoder through every command, and its texts against those of transformers."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import BartConfig, BartForConditionalGeneration, GenerationConfig

import kvgraph
from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.runtime.encoder_decoder_model import EncoderDecoderModel
from kvgraph.runtime.token_rules import TokenRules

V, START, EOS, PAD = 97, 2, 1, 3
SOURCES = [[7, 8, 9, 10, 11, 1], [20, 1], [33, 34, 35, 36, 37, 38, 39, 40, 41, 1]]
SENTENCE = "w7 w8 w9 w30"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BART that ends texts now and then, with a tokenizer of one word a token."""
    torch.manual_seed(3)
    config = BartConfig(
        vocab_size=V,
        d_model=30,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=44,
        decoder_ffn_dim=36,
        encoder_attention_heads=5,
        decoder_attention_heads=3,
        max_position_embeddings=64,
        init_std=0.3,
        pad_token_id=PAD,
        bos_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config)
    model.final_logits_bias.normal_()
    model.final_logits_bias[0, EOS] += 2
    path = tmp_path_factory.mktemp("bart")
    model.generation_config = GenerationConfig(
        bos_token_id=0, eos_token_id=EOS, pad_token_id=PAD, decoder_start_token_id=START
    )
    model.save_pretrained(path)
    words = {"<s>": 0, "</s>": EOS, **{f"w{token}": token for token in range(2, V)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, quick_tracing: None) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "bart"
    assert main(["export", str(checkpoint), "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def model(bundle: Path) -> EncoderDecoderModel:
    loaded = kvgraph.load(bundle)
    assert isinstance(loaded, EncoderDecoderModel)
    return loaded


def expected(checkpoint: Path, **settings: Any) -> list[list[int]]:
    """What transformers writes after each source, the start token and padding left out."""
    reference = BartForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    longest = max(map(len, SOURCES))
    ids = torch.tensor([source + [PAD] * (longest - len(source)) for source in SOURCES])
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in SOURCES])
    with torch.no_grad():
        found = reference.generate(ids, attention_mask=mask, do_sample=False, **settings)
    rows = [row[1:].tolist() for row in found]
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


RULES = {
    "no rules": ({}, TokenRules()),
    "forced first and last": (
        {"forced_bos_token_id": 50, "forced_eos_token_id": EOS},
        TokenRules(first=50, last=EOS),
    ),
    "forbidden": (
        {"bad_words_ids": [[PAD], [12]], "suppress_tokens": [60]},
        TokenRules(None, None, (PAD, 12, 60)),
    ),
}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_tokens_equal_those_of_transformers(
    checkpoint: Path, model: EncoderDecoderModel, name: str, num_beams: int
) -> None:
    settings, rules = RULES[name]
    right = expected(checkpoint, num_beams=num_beams, max_new_tokens=12, **settings)
    ruled = replace(model, rules=rules)
    found = ruled.generate(SOURCES, max_new_tokens=12, num_beams=num_beams)
    assert [list(generation.token_ids) for generation in found] == right


def test_a_text_is_the_source_and_ends_as_its_tokenizer_says(model: EncoderDecoderModel) -> None:
    by_text = model.generate(SENTENCE, max_new_tokens=8)
    by_ids = model.generate([7, 8, 9, 30, EOS], max_new_tokens=8)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text.split() == [f"w{token}" for token in by_text.token_ids if token > EOS]


def test_streamed_events_make_the_same_text(model: EncoderDecoderModel) -> None:
    whole = model.generate(SENTENCE, max_new_tokens=8)
    events = list(model.stream(SENTENCE, max_new_tokens=8))
    assert "".join(event.text for event in events) == whole.text


@pytest.mark.parametrize(
    ("source", "message"),
    [([], "source 0 has shape"), ([V], "expected 0 <= value < 97"), ([5] * 65, "the encoder takes 64")],
)
def test_impossible_sources_are_refused(model: EncoderDecoderModel, source: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate([source], max_new_tokens=4)


def test_run_writes_what_the_library_generates(
    bundle: Path, model: EncoderDecoderModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(bundle), "--prompt", SENTENCE, "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip() == model.generate(SENTENCE, max_new_tokens=8).text.strip()


@pytest.mark.parametrize("extra", [[], ["--layers"], ["--prefill-chunk", "3"]], ids=str)
def test_compare_with_the_checkpoint_is_in_band(
    bundle: Path, tmp_path: Path, extra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text, report = tmp_path / "source.txt", tmp_path / "report.json"
    text.write_text(SENTENCE)
    flags = ["--text", str(text), "--prefill", "5", "--steps", "9", "--json", str(report)]
    assert main(["compare", str(bundle), *flags, *extra]) == 0
    assert "cross tensors, in band" in capsys.readouterr().out
    data = json.loads(report.read_text())
    assert data["totals"]["tokens"] == 14
    assert len(data["cross"]) == 2
    assert max(error["max_abs"] for error in data["cross"]) < 1e-4


def test_compare_along_a_target_text(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, target = tmp_path / "source.txt", tmp_path / "target.txt"
    text.write_text(SENTENCE)
    target.write_text("w40 w41 w42")
    flags = ["--text", str(text), "--target-text", str(target), "--prefill", "2", "--steps", "9"]
    assert main(["compare", str(bundle), *flags]) == 0
    # The start token, three words and the end.
    assert "5 tokens" in capsys.readouterr().out


def test_another_source_is_out_of_band(bundle: Path, model: EncoderDecoderModel) -> None:
    from kvgraph.runtime.parity_bands import band_for
    from kvgraph.runtime.parity_sources import compare_encoded
    from kvgraph.runtime.sources import encode_sources

    session: Any = model.session
    first, second = encode_sources(session, [[7, 8, 1]]), encode_sources(session, [[7, 9, 1]])
    contract = session.contract.encoder
    same = compare_encoded(first, first, contract, [3], band_for("float32"))
    other = compare_encoded(first, second, contract, [3], band_for("float32"))
    assert all(error.in_band for error in same)
    assert not any(error.in_band for error in other)


def test_inspect_shows_three_graphs(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    for line in ("encode, out", "cross.{i}.key", "encoder_length", "per token of a source"):
        assert line in shown
    assert main(["inspect", str(bundle), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data["operators"]) == {"encode", "prefill", "decode"}
    # Two layers, keys and values of 3 heads of 10, float32.
    assert data["cache"]["bytes_per_source_token"] == 2 * 2 * 30 * 4


def test_quantize_rounds_the_weights_of_all_graphs(bundle: Path, tmp_path: Path) -> None:
    output, text = tmp_path / "int8", tmp_path / "source.txt"
    text.write_text(SENTENCE)
    assert main(["quantize", str(bundle), "-o", str(output), "--recipe", "int8-wo"]) == 0
    found = json.loads((output / "bundle.json").read_text())
    modules = {module["module"]: module["graphs"] for module in found["quantization"]["modules"]}
    assert modules["model.encoder.layers.0.self_attn.q_proj"] == ["encode"]
    assert modules["model.layers.1.cross_attn.k_proj"] == ["encode"]
    assert modules["model.layers.1.cross_attn.q_proj"] == ["prefill", "decode"]
    flags = ["--against", str(bundle), "--text", str(text), "--prefill", "5", "--steps", "9"]
    assert main(["compare", str(output), *flags]) == 0


def test_bench_times_the_encoder_apart(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraph.runtime.bench.read_bandwidth", lambda threads: 1e9)
    report = tmp_path / "bench.json"
    sizes = {"source-tokens": "20", "prompt-tokens": "4", "new-tokens": "4", "batch": "2", "runs": "2"}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", value)]
    assert main(["bench", str(bundle), *flags, "--json", str(report)]) == 0
    data = json.loads(report.read_text())
    assert data["encode"]["count"] == 2
    assert data["options"]["source_tokens"] == 20
    # Of a layer: self-attention, the queries and the output of cross-attention, the feed-forward part, three norms.
    layer = 4 * (900 + 30) + 2 * (900 + 30) + 2 * 30 * 36 + 36 + 30 + 3 * 60
    weights = 2 * layer + 97 * 30 + 97 + 60
    # Two rows of 4 tokens and of 20 source tokens, keys and values of 30 in two layers.
    assert data["decode"][0]["bytes_read"] == 4 * (weights + 2 * (4 + 20) * 2 * 30 * 2)
    assert "encode" in capsys.readouterr().out


@pytest.mark.parametrize("kernels", ["kvgraph", "onnxruntime"])
def test_ort_cpu_target_computes_the_same(
    bundle: Path, tmp_path: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, text = tmp_path / "copy", tmp_path / "source.txt"
    shutil.copytree(bundle, copy)
    text.write_text(SENTENCE)
    build = ["build", str(copy), "--target", "ort-cpu", "--kernels", kernels]
    assert main([*build, "--standalone", str(tmp_path / "alone")]) == 0
    flags = ["--text", str(text), "--prefill", "5", "--steps", "9"]
    assert main(["compare", str(copy), "--target", "ort-cpu", *flags]) == 0
    shutil.rmtree(copy)
    assert main(["compare", str(tmp_path / "alone"), *flags]) == 0
    assert capsys.readouterr().out.count("cross tensors, in band") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["perplexity", "BUNDLE", "--text", "TEXT"], "a text alone has no perplexity"),
        (["bench", "BUNDLE", "--source-tokens", "65"], "source_tokens is 65, the encoder takes 64"),
        (["run", "BUNDLE", "--chat"], "chat template"),
        (["compare", "BUNDLE", "--save-polygraphy", "TEXT.d"], "--save-polygraphy is for models without"),
        (
            ["quantize", "BUNDLE", "-o", "OUT", "--kv-cache", "int8", "--calibration", "TEXT"],
            "has an encoder",
        ),
        (["quantize", "BUNDLE", "-o", "OUT", "--recipe", "int8-wo", "--evaluation", "TEXT"], "--evaluation"),
        (["quantize", "BUNDLE", "-o", "OUT", "--recipe", "prefill=int8-wo,decode=int4-wo"], "one recipe"),
        (["export", "CHECKPOINT", "-o", "OUT", "--recipe", "prefill=int8-wo,decode=int4-wo"], "one recipe"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_refused_in_one_line(
    checkpoint: Path,
    bundle: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text.txt").write_text(f"{SENTENCE}\n" * 20)
    names = {"BUNDLE": str(bundle), "TEXT": str(tmp_path / "text.txt"), "OUT": str(tmp_path / "out")}
    names |= {"TEXT.d": str(tmp_path / "polygraphy"), "CHECKPOINT": str(checkpoint)}
    monkeypatch.setattr("sys.stdin", io.StringIO("w7\n"))
    assert main([names.get(argument, argument) for argument in arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_export_quantizes_all_three_graphs(checkpoint: Path, bundle: Path, tmp_path: Path) -> None:
    recipe = ["--recipe", "int8-wo"]
    assert main(["export", str(checkpoint), "-o", str(tmp_path / "direct"), *recipe]) == 0
    assert main(["quantize", str(bundle), "-o", str(tmp_path / "quantized"), *recipe]) == 0
    # Hashes of the graphs, the weights and the tokenizer.
    files = [Bundle.open(tmp_path / name, verify=True).files for name in ("direct", "quantized")]
    assert files[0] == files[1]


def test_padding_of_sources_changes_nothing(model: EncoderDecoderModel) -> None:
    together = model.generate(SOURCES, max_new_tokens=10)
    alone = [model.generate(source, max_new_tokens=10) for source in SOURCES]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
