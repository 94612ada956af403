"""The committed tiny model: what it is, what it writes, and that the script beside it makes it."""

from __future__ import annotations

import importlib
import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

FOLDER = Path(__file__).parent / "tiny_model"
MODEL = FOLDER / "model"
sys.path.insert(0, str(FOLDER))  # where Python looks when the script is run
stories = importlib.import_module("stories")
train = importlib.import_module("train")

SIZE_LIMIT_BYTES = 3_000_000
FRESH_SEED = 20261
# A language model cannot need less than the source's entropy; what it needs more is what it has not learned.
LOSS_OVER_ENTROPY = 1.16
PROMPTS = ["", "Once upon a time", "One sunny day, Lily", "Tom was a brave boy who"]
NAMES = {name for key in ("girl", "boy", "animal_name") for name in stories.WORDS[key][0]}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(MODEL)
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def known_words() -> set[str]:
    return {word for story in take_stories(FRESH_SEED, 1000) for word in words_of(story)}


def words_of(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text)


def take_stories(seed: int, count: int) -> list[str]:
    return [story.text for story in itertools.islice(stories.tell_stories(seed), count)]


def check_form(text: str) -> None:
    """Assert that each line is made of sentences: capitals, closed quotes, articles, spaces, a last stop."""
    for line in text.split("\n"):
        assert re.fullmatch(r'["A-Z].*[.!?]"?', line), line
        assert line.count('"') % 2 == 0, line
        assert not re.search(r" [ .,!?]|\b[Aa] [aeiou]", line), line


def check_coherence(text: str) -> None:
    """Assert that a story is about a hero with at most one friend and one elder."""
    assert 1 <= len(NAMES & set(words_of(text))) <= 2
    elders = "|".join(stories.WORDS["elder"][0])
    assert len(set(re.findall(rf"(?:his|her) (?:{elders})\b", text.lower()))) <= 1


def test_generator_writes_coherent_distinct_stories() -> None:
    texts = take_stories(FRESH_SEED, 1000)
    for text in texts:
        check_form(text)
        check_coherence(text)
    assert len(set(texts)) == len(texts)
    assert texts[:20] == take_stories(FRESH_SEED, 20)


def test_committed_files_stay_small() -> None:
    sizes = [
        path.stat().st_size
        for path in FOLDER.rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    ]
    assert sum(sizes) <= SIZE_LIMIT_BYTES


def test_parameter_count_follows_from_the_config(model: LlamaForCausalLM) -> None:
    config = json.loads((MODEL / "config.json").read_text("utf-8"))
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * ffn + 2 * hidden
    expected = config["vocab_size"] * hidden + config["num_hidden_layers"] * layer + hidden
    assert sum(parameter.numel() for parameter in model.parameters()) == expected == 689_280
    assert config["model_type"] == "llama"
    assert config["num_key_value_heads"] < config["num_attention_heads"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_story_is_readable_and_ends(
    model: LlamaForCausalLM, tokenizer: Tokenizer, known_words: set[str], prompt: str
) -> None:
    prompt_ids = tokenizer.encode(prompt).ids
    (ids,) = model.generate(torch.tensor([prompt_ids]), do_sample=False, max_length=train.CONTEXT).tolist()
    assert ids[0] == train.BOS
    assert ids[-1] == train.EOS
    text = tokenizer.decode(ids)
    assert text.startswith(prompt)
    check_form(text)
    assert len(text.split("\n")) >= 4
    assert set(words_of(text)) <= known_words


def test_loss_on_new_stories_is_near_the_entropy_of_their_source(
    model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    loss, entropy = train.measure_loss(model, tokenizer, FRESH_SEED, 30)
    assert loss < LOSS_OVER_ENTROPY * entropy


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two spaces  ",
        "Tuft\n\tsaid: «naïve café» — 東京 🦊",
        "e\u0301\u200d\x00\x7f\ufffd",
        "👩‍👩‍👧‍👦 שלום 0123456789",
    ],
)
def test_tokenizer_gives_any_text_back(tokenizer: Tokenizer, text: str) -> None:
    encoded = tokenizer.encode(text)
    assert encoded.ids[0] == train.BOS
    assert train.UNK not in encoded.ids
    assert tokenizer.decode(encoded.ids) == text


def test_tokenizer_gives_random_unicode_back(tokenizer: Tokenizer) -> None:
    source = random.Random(FRESH_SEED)
    # Surrogates are not text, and U+2581 stands for the space.
    points = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000 and point != 0x2581]
    for _ in range(100):
        text = "".join(map(chr, source.choices(points, k=20)))
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_byte_tokens_follow_the_special_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.id_to_token(index) for index in range(3)] == ["<unk>", "<s>", "</s>"]
    assert [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)] == list(range(3, 259))
    assert tokenizer.encode("é", add_special_tokens=False).ids[-2:] == [3 + 0xC3, 3 + 0xA9]


def test_transformers_reads_the_tokenizer_alike(tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(MODEL)
    text = take_stories(FRESH_SEED, 1)[0] + " 🦊"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    chat = [{"role": "user", "content": "Once upon a time,"}, {"role": "assistant", "content": "there was"}]
    assert theirs.apply_chat_template(chat, tokenize=False) == "<s>Once upon a time, there was"


def test_script_makes_the_committed_tokenizer_and_config(tokenizer: Tokenizer, tmp_path: Path) -> None:
    trained = train.train_tokenizer(take_stories(train.TOKENIZER_SEED, train.TOKENIZER_STORIES))
    assert json.loads(trained.to_str()) == json.loads(tokenizer.to_str())
    train.save(train.train_model(trained, steps=2, minutes=0.0), trained, tmp_path)
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        made, committed = ((folder / name).read_text("utf-8") for folder in (tmp_path, MODEL))
        assert drop_versions(made) == drop_versions(committed), name


def drop_versions(text: str) -> str:
    return re.sub(r'\n *"transformers_version": .*', "", text)
