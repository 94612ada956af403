import json

import pytest
import tokenizers
import transformers

from kvgraph.runtime.tokenizer import Tokenizer

WORDS = ["<unk>", "<s>", "</s>", "<|end|>", "a", "b"]


def backend(adds_bos=True):
    """A vocabulary of letters whose post-processor may add <s>."""
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(WORDS[:4])
    if adds_bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return made


def write(directory, **files):
    backend().save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def goldens(directory):
    texts = (directory / "golden.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (directory / "golden.out").read_text().split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=False)]


def test_llama_ids_equal_the_goldens(shared_data):
    directory = shared_data / "tokenizers" / "llama-spm"
    tokenizer, cases = Tokenizer.load(directory), goldens(directory)
    assert len(cases) == 47
    for text, ids in cases:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_gpt2_ids_equal_the_goldens(shared_data):
    directory = shared_data / "tokenizers" / "gpt2"
    files = [str(directory / name) for name in ("vocab.json", "merges.txt")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*files))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(made)
    for text, ids in goldens(directory):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("text", ["a b", "<s>a b", "<s> a b", "<s>", ""])
def test_raw_prompt_gets_one_bos_if_the_tokenizer_adds_one(text):
    ids = Tokenizer(backend(), bos_token_id=1).encode(text)
    assert ids.count(1) == 1
    assert ids[0] == 1


@pytest.mark.parametrize("text", ["a b", "<s>a b"])
def test_tokenizer_that_adds_no_bos_leaves_the_text_alone(text):
    tokenizer = Tokenizer(backend(adds_bos=False), bos_token_id=1)
    assert not tokenizer.adds_bos
    assert tokenizer.encode(text) == ([1] if "<s>" in text else []) + [4, 5]


@pytest.mark.parametrize(("text", "ids"), [("a b", [4, 5]), ("<s>a b", [1, 4, 5])])
def test_rendered_chat_gets_no_special_tokens(text, ids):
    assert Tokenizer(backend(), bos_token_id=1).encode(text, add_special_tokens=False) == ids


def test_ids_equal_those_of_transformers(tmp_path):
    write(tmp_path, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False})
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    for text in ("a b", "", "b</s>"):
        for special in (True, False):
            assert tokenizer.encode(text, special) == oracle.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("eos", [2, [2, 3], [3]])
def test_eos_is_the_union_of_all_files(tmp_path, eos):
    write(tmp_path, generation_config={"eos_token_id": eos}, config={"eos_token_id": 5})
    named = {*(eos if isinstance(eos, list) else [eos]), 5}
    assert set(Tokenizer.load(tmp_path).eos_token_ids) == named
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert Tokenizer.load(tmp_path).eos_token_ids == tuple(sorted({*named, 2}))


def test_given_config_replaces_the_file(tmp_path):
    write(tmp_path, config={"bos_token_id": 5, "eos_token_id": 5})
    tokenizer = Tokenizer.load(tmp_path, {"bos_token_id": 1, "eos_token_ids": (2, 3)})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2, 3))


@pytest.mark.parametrize(
    ("files", "bos"),
    [
        ({"tokenizer_config": {"bos_token": "a"}, "generation_config": {"bos_token_id": 1}}, 4),
        ({"tokenizer_config": {"bos_token": None}, "generation_config": {"bos_token_id": 1}}, 1),
        ({"generation_config": {"bos_token_id": 1}, "config": {"bos_token_id": 5}}, 1),
        ({"config": {"bos_token_id": 5}}, 5),
        ({"config": {"bos_token_id": None}}, None),
        ({}, None),
    ],
)
def test_bos_comes_from_the_first_file_that_names_one(tmp_path, files, bos):
    assert Tokenizer.load(write(tmp_path, **files)).bos_token_id == bos


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    made = backend()
    made.enable_truncation(3)
    made.enable_padding(length=8)
    made.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode("a b a b") == [1, 4, 5, 4, 5]


def test_decode_leaves_out_special_and_unknown_ids():
    tokenizer = Tokenizer(backend(), bos_token_id=1)
    assert tokenizer.decode([1, 4, 5, 2, 99, -1, 2**40]) == "a b"
    assert tokenizer.decode([1, 4, 2], skip_special_tokens=False) == "<s> a </s>"


def test_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "Unheard"}}'])
def test_broken_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"tokenizer_config": {"eos_token": "<absent>"}},
            r"eos_token is '<absent>', which tokenizer\.json does not",
        ),
        ({"generation_config": {"eos_token_id": "2"}}, r"eos_token_id is '2', expected an integer"),
        ({"generation_config": {"eos_token_id": [2, True]}}, r"eos_token_id is \[2, True\]"),
        ({"generation_config": [1]}, r"generation_config\.json: holds a list"),
    ],
)
def test_wrong_files_are_named(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(write(tmp_path, **files))


def test_text_that_is_not_unicode_is_refused(shared_data):
    tokenizer = Tokenizer.load(shared_data / "stories260k")
    with pytest.raises(ValueError, match="not valid Unicode at character 2"):
        tokenizer.encode("ab\udcff")
