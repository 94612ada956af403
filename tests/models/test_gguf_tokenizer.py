"""Tokenizers in GGUF files: ids that llama.cpp gives, words, special tokens and templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf import TokenType

from kvgraph.models.gguf_file import GGUFFile, read_gguf
from kvgraph.models.gguf_tokenizer import generation_config, tokenizer_files
from kvgraph.models.gguf_tokenizer_models import PRE_TOKENIZERS, build_tokenizer
from kvgraph.models.gguf_vocabulary import read_vocabulary
from kvgraph.runtime.chat import ChatTemplate
from kvgraph.runtime.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER, BYTE = (
    TokenType[name] for name in ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "BYTE")
)


def load(file: GGUFFile, directory: Path) -> Tokenizer:
    """The tokenizer as a bundle has it."""
    for name, text in tokenizer_files(file).items():
        (directory / name).write_text(text, encoding="utf-8")
    return Tokenizer.load(directory, generation_config(file))


def written(path: Path, model: str, tokens: list[str], types: list[int], **entries: Any) -> GGUFFile:
    """A file of a vocabulary, written with the gguf package; `entries` are by the names of its methods."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in entries.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def goldens(directory: Path) -> list[tuple[str, list[int]]]:
    texts = (directory / "golden.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (directory / "golden.out").read_text().split("\n")
    cases = [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=False)]
    assert len(cases) == 47
    return cases


def llama_file(shared_data: Path, path: Path, **entries: Any) -> GGUFFile:
    """Llama 2's vocabulary, of which Hugging Face's file has merges and not the scores.

    They count down from -1 after the bytes, except that runs of spaces come last.
    """
    source = json.loads(
        (shared_data / "tokenizers" / "llama-spm" / "tokenizer.json").read_text(encoding="utf-8")
    )
    tokens = sorted(source["model"]["vocab"], key=source["model"]["vocab"].__getitem__)
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [
        -1e9 if len(token) > 1 and set(token) == {"▁"} else float(-rank)
        for rank, token in enumerate(tokens[259:])
    ]
    special = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    return written(path, "llama", tokens, types, token_scores=scores, **{**special, **entries})


def test_llama_ids_are_the_goldens(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load(llama_file(shared_data, tmp_path / "m.gguf"), tmp_path)
    for text, ids in goldens(shared_data / "tokenizers" / "llama-spm"):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.adds_bos) == (1, (2,), True)


@pytest.mark.parametrize("name", ["botchan_en.txt", "wagahai_ja.txt"])
def test_llama_ids_of_a_novel_are_those_of_the_original_merges(
    name: str, shared_data: Path, tmp_path: Path
) -> None:
    text = (shared_data / "text" / name).read_bytes().decode()[:20000]
    tokenizer = load(llama_file(shared_data, tmp_path / "m.gguf"), tmp_path)
    ids = tokenizer.encode(text)
    assert ids == Tokenizer.load(shared_data / "tokenizers" / "llama-spm", {"bos_token_id": 1}).encode(text)
    assert tokenizer.decode(ids) == text


def test_a_text_gets_the_space_and_the_tokens_that_the_file_asks_for(
    shared_data: Path, tmp_path: Path
) -> None:
    plain = load(
        llama_file(shared_data, tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False), tmp_path
    )
    assert [plain.backend.id_to_token(token) for token in plain.encode("Hello world")] == ["Hello", "▁world"]
    assert plain.decode(plain.encode(" Hello")) == " Hello"
    framed = load(llama_file(shared_data, tmp_path / "m.gguf", add_eos_token=True), tmp_path)
    assert [framed.backend.id_to_token(token) for token in framed.encode("Hello")] == [
        "<s>",
        "▁Hello",
        "</s>",
    ]


def gpt2_file(shared_data: Path, path: Path, pre: str, **entries: Any) -> GGUFFile:
    directory = shared_data / "tokenizers" / "gpt2"
    vocab = json.loads((directory / "vocab.json").read_text(encoding="utf-8"))
    lines = (directory / "merges.txt").read_text(encoding="utf-8").splitlines()
    merges = [line for line in lines if line and not line.startswith("#version")]
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [CONTROL if token == "<|endoftext|>" else NORMAL for token in tokens]
    return written(path, "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, **entries)


def test_gpt2_ids_are_the_goldens(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = load(gpt2_file(shared_data, tmp_path / "m.gguf", "gpt-2", eos_token_id=50256), tmp_path)
    for text, ids in goldens(shared_data / "tokenizers" / "gpt2"):
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>b") == [64, 50256, 65]


def in_memory(**settings: Any) -> GGUFFile:
    """A small vocabulary; `settings` change its keys, and ... leaves one out."""
    letters = [chr(letter) for letter in range(33, 127)]
    tokens = [*letters, "Ġ", "Ċ", "ab", "<|end|>", "<tool>"]
    found: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL, USER],
        "merges": ["a b"],
        **settings,
    }
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not ...}
    return GGUFFile(Path("m.gguf"), metadata, {})


TEXT = "I'LL pay 1234€\n\n  ok iOS/"
# By the definitions of the tokenizers that gave them their names.
WORDS = {
    "gpt-2": ["I", "'", "LL", " pay", " 1234", "€", "\n\n ", " ok", " iOS", "/"],
    "llama-bpe": ["I", "'LL", " pay", " ", "123", "4", "€\n\n", " ", " ok", " iOS", "/"],
    "dbrx": ["I", "'LL", " pay", " ", "123", "4", "€\n\n", " ", " ok", " iOS", "/"],
    "qwen2": ["I", "'LL", " pay", " ", "1", "2", "3", "4", "€\n\n", " ", " ok", " iOS", "/"],
    "smollm": ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "€", "\n\n ", " ok", " iOS", "/"],
    "gpt-4o": ["I'LL", " pay", " ", "123", "4", "€\n\n", " ", " ok", " i", "OS", "/"],
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_those_of_the_named_tokenizer(pre: str) -> None:
    vocabulary = read_vocabulary(in_memory(pre=pre, bos_token_id=0))
    assert vocabulary is not None
    splitter = build_tokenizer(vocabulary).pre_tokenizer
    assert splitter is not None
    assert [TEXT[start:stop] for _, (start, stop) in splitter.pre_tokenize_str(TEXT)] == WORDS[pre]


def test_every_name_is_one_of_the_tested_kinds() -> None:
    tested = [PRE_TOKENIZERS[name] for name in WORDS]
    assert all(kind in tested for kind in PRE_TOKENIZERS.values())


def test_qwen_composes_letters_and_accents(tmp_path: Path) -> None:
    # The two bytes of the composed letter, as byte-level tokens spell them.
    tokens = ["e", "Ã", "©", "Ã©"]
    tokenizer = load(in_memory(pre="qwen2", tokens=tokens, token_type=[NORMAL] * 4, merges=["Ã ©"]), tmp_path)
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9") == [3]


def test_special_tokens_are_whole_and_hidden_only_if_they_are_control(tmp_path: Path) -> None:
    tokenizer = load(in_memory(eos_token_id=97), tmp_path)
    ids = tokenizer.encode("ab<|end|><tool>")
    assert [tokenizer.backend.id_to_token(token) for token in ids] == ["ab", "<|end|>", "<tool>"]
    assert tokenizer.decode(ids) == "ab<tool>"


@pytest.mark.parametrize("run", ["  ", "▁▁"])
def test_a_run_of_spaces_may_be_a_token_that_users_defined(run: str, tmp_path: Path) -> None:
    settings = {
        "tokens": ["<unk>", "▁", "a", "b", run],
        "token_type": [UNKNOWN, NORMAL, NORMAL, NORMAL, USER],
    }
    flags = {"add_space_prefix": False, "add_bos_token": False}
    tokenizer = load(in_memory(model="llama", scores=[0.0] * 5, merges=..., **settings, **flags), tmp_path)
    assert tokenizer.encode("a b") == [2, 1, 3]
    assert tokenizer.encode("a  b") == [2, 4, 3]
    assert tokenizer.decode([2, 4, 3]) == "a  b"


def test_llama3_prompts_begin_with_bos_and_others_do_not(tmp_path: Path) -> None:
    assert load(in_memory(pre="llama-bpe", bos_token_id=97), tmp_path).encode("a") == [97, 64]
    assert load(in_memory(pre="llama-bpe", bos_token_id=97, add_bos_token=False), tmp_path).encode("a") == [
        64
    ]
    assert load(in_memory(pre="qwen2", bos_token_id=97), tmp_path).encode("a") == [64]
    assert load(in_memory(pre="qwen2", bos_token_id=97, add_bos_token=True), tmp_path).encode("a") == [97, 64]


def test_turns_and_messages_end_texts_too() -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 5, "eom_token_id": 2}
    assert generation_config(in_memory(**ids)) == {"bos_token_id": 1, "eos_token_id": [2, 5]}
    assert generation_config(in_memory()) == {}


def test_the_chat_template_is_carried(tmp_path: Path) -> None:
    file = in_memory(eos_token_id=97)
    metadata = {**file.metadata, "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    tokenizer = load(GGUFFile(file.path, metadata, {}), tmp_path)
    template = ChatTemplate.load(tmp_path, tokenizer)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "hi<|end|>"


def test_templates_by_name_are_carried(tmp_path: Path) -> None:
    file = in_memory()
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    tokenizer = load(GGUFFile(file.path, {**file.metadata, **named}, {}), tmp_path)
    template = ChatTemplate.load(tmp_path, tokenizer)
    assert template is not None
    assert (template.render([]), template.render([], tools=[{}])) == ("plain", "with tools")


def test_a_file_may_have_no_vocabulary() -> None:
    assert tokenizer_files(in_memory(model="none")) == tokenizer_files(in_memory(model=...)) == {}


REFUSED: dict[str, dict[str, Any]] = {
    "tokenizer.ggml.model 'bert' is not implemented; known: llama, gpt2": {"model": "bert"},
    "tokenizer.ggml.pre 'viking' is not implemented; known: gpt-2, ": {"pre": "viking"},
    "tokenizer.ggml.pre None is not implemented": {"pre": ...},
    "tokenizer.ggml.tokens is missing": {"tokens": ...},
    "tokenizer.ggml.token_type is missing": {"token_type": ...},
    "tokenizer.ggml.token_type has 3 values, expected one for each of 99": {"token_type": [NORMAL] * 3},
    "tokens 0 and 1 are both 'x'": {"tokens": ["x", "x"], "token_type": [NORMAL] * 2},
    "tokenizer.ggml.scores is missing": {"model": "llama"},
    "merge 'a c' needs 'ac', which is no token": {"merges": ["a c"]},
    "tokenizer.ggml.merges holds 'ab', expected two tokens": {"merges": ["ab"]},
    "tokenizer.ggml.eos_token_id is 99, expected the id of one of 99 tokens": {"eos_token_id": 99},
    "texts get a bos token, but tokenizer.ggml.bos_token_id is missing": {"add_bos_token": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_with_a_vocabulary_is_named(message: str) -> None:
    with pytest.raises(ValueError, match=f"m.gguf: {message}"):
        tokenizer_files(in_memory(**REFUSED[message]))
