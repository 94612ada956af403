"""What files of texts, chats and token ids become, against the tokenizers that transformers makes of the same files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import Contract, scatter_state
from kvgraph.quant.calibration_data import CalibrationOptions, check_sequences, read_calibration

BOS = 1
LONG = " ".join(["Lily had a red ball and she loved it."] * 40)


@pytest.fixture
def bundle(repository: Path) -> Bundle:
    """The tiny model's tokenizer and chat template, with a contract; nothing here runs a graph."""
    path = repository / "tests" / "tiny_model" / "model"
    config = json.loads((path / "config.json").read_text())
    contract = Contract(config["vocab_size"], 2, 512, False, scatter_state([(2, 8)], "float32"))
    return Bundle(
        path=path,
        schema_version=1,
        tool_version="0",
        model_type="llama",
        config={"bos_token_id": BOS, "eos_token_ids": []},
        dtype="float32",
        residual_dtype="float32",
        contract=contract,
        recipe=None,
        source={},
        weights={},
        files={},
        versions={},
    )


def write(folder: Path, text: str, name: str = "data.txt") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def encoded(bundle: Bundle, text: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(bundle.path)(text)["input_ids"]
    return ids


def as_lists(sequences: tuple[np.ndarray, ...]) -> list[list[int]]:
    return sorted(ids.tolist() for ids in sequences)


LINES = [f"Tom saw {count} birds in the tall green tree by the house." for count in range(12)]


def test_lines_are_samples(bundle: Bundle, tmp_path: Path) -> None:
    data = read_calibration(write(tmp_path, "\r\n".join(LINES)), bundle)
    assert as_lists(data.sequences) == sorted(encoded(bundle, line) for line in LINES)


def test_blocks_are_samples_where_empty_lines_part_them(bundle: Bundle, tmp_path: Path) -> None:
    blocks = ["\n".join(LINES[start : start + 3]) for start in range(0, 12, 3)]
    data = read_calibration(write(tmp_path, "\n \n\n".join(blocks)), bundle)
    assert as_lists(data.sequences) == sorted(encoded(bundle, block) for block in blocks)


def test_pieces_of_a_long_text_each_begin_with_its_first_token(bundle: Bundle, tmp_path: Path) -> None:
    data = read_calibration(write(tmp_path, LONG), bundle, CalibrationOptions(sequence_length=50))
    whole = encoded(bundle, LONG)
    assert whole[0] == BOS
    assert {ids[0] for ids in data.sequences} == {BOS}
    assert [len(ids) for ids in data.sequences[:-1]] == [50] * (len(data.sequences) - 1)
    assert data.tokens - len(data.sequences) == len(whole) - 1


def test_chats_are_rendered_by_the_template(bundle: Bundle, tmp_path: Path) -> None:
    chats = [
        [
            {"role": "user", "content": f"Tell me a story about {name}."},
            {"role": "assistant", "content": LONG},
        ]
        for name in ("Ann", "Ben")
    ]
    lines = [json.dumps({"messages": chats[0]}), json.dumps(chats[1]), "", json.dumps({"text": LINES[0]})]
    path = write(tmp_path, "\n".join(lines), "data.jsonl")
    data = read_calibration(path, bundle, CalibrationOptions(sequence_length=40))
    tokenizer = AutoTokenizer.from_pretrained(bundle.path)
    rendered = [tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"][:40] for chat in chats]
    assert as_lists(data.sequences) == sorted([*rendered, encoded(bundle, LINES[0])])


def test_rows_and_pieces_of_token_ids(bundle: Bundle, tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, bundle.contract.vocab_size, (3, 20), dtype=np.int32)
    np.save(tmp_path / "rows.npy", ids)
    np.save(tmp_path / "stream.npy", ids.reshape(-1))
    options = CalibrationOptions(sequence_length=12)
    rows = read_calibration(tmp_path / "rows.npy", bundle, options)
    stream = read_calibration(tmp_path / "stream.npy", bundle, options)
    assert as_lists(rows.sequences) == sorted([*ids[:, :12].tolist(), *ids[:, 12:].tolist()])
    assert as_lists(stream.sequences) == sorted(ids.reshape(5, 12).tolist())


def test_the_seed_chooses_samples(bundle: Bundle, tmp_path: Path) -> None:
    path = write(tmp_path, "\n".join(LINES))
    chosen = [
        as_lists(read_calibration(path, bundle, CalibrationOptions(samples=5, seed=seed)).sequences)
        for seed in (0, 0, 1)
    ]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(chosen[0]) == 5
    assert all(ids in [encoded(bundle, line) for line in LINES] for ids in chosen[2])


def test_the_digest_is_of_the_tokens(bundle: Bundle) -> None:
    first, second = np.arange(40), np.arange(40)[::-1].copy()
    one = check_sequences([first, second], bundle, "here")
    assert one.digest() == check_sequences([first, second], bundle, "there").digest()
    # The same tokens, cut at another place.
    assert one.digest() != check_sequences([first[:39], np.append(first[39:], second)], bundle, "x").digest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\r\n ", "the file is empty"),
        (b"Tom ran.", r"tokens in 1 sequences of two or more, expected at least 32"),
        (b"caf\xe9", "not UTF-8"),
    ],
    ids=["no bytes", "spaces", "few tokens", "Latin-1"],
)
def test_text_that_says_nothing_is_refused(
    bundle: Bundle, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_calibration(tmp_path / "data.txt", bundle)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ('{"prompt": "x"}', "line 2 is neither a text nor a chat"),
        ('["a", "b"]', "line 2 is neither a text nor a chat"),
        ("[]", "line 2 is neither a text nor a chat"),
    ],
)
def test_broken_lines_are_named(bundle: Bundle, tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, json.dumps(LONG) + "\n" + line, "data.jsonl")
    with pytest.raises(ValueError, match=message):
        read_calibration(path, bundle)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.full(64, np.nan), "NaN or infinite"),
        (np.full((4, 16), np.inf), "NaN or infinite"),
        (np.zeros(64), "expected integers"),
        (np.zeros((2, 2, 16), np.int64), "expected integers"),
        (np.zeros(0, np.int64), "0 tokens"),
        (np.full((4, 16), -1), "token id -1"),
        (np.full(64, 10**6), "token id 1000000"),
        (np.full(64, 2**63, np.uint64), "token id"),
    ],
    ids=["NaN", "infinite", "floats", "3 dimensions", "empty", "negative", "out of vocabulary", "64 bits"],
)
def test_arrays_that_hold_no_token_ids_are_refused(
    bundle: Bundle, tmp_path: Path, array: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "data.npy", array)
    with pytest.raises(ValueError, match=message):
        read_calibration(tmp_path / "data.npy", bundle)


def test_pickles_are_not_loaded(bundle: Bundle, tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", np.array([object()]), allow_pickle=True)
    with pytest.raises(ValueError, match="not a NumPy array of token ids"):
        read_calibration(tmp_path / "data.npy", bundle)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (CalibrationOptions(sequence_length=513), "sequence_length is 513, expected 2 to 512"),
        (CalibrationOptions(sequence_length=1), "sequence_length is 1"),
        (CalibrationOptions(samples=0), "samples is 0"),
    ],
)
def test_options_are_checked(
    bundle: Bundle, tmp_path: Path, options: CalibrationOptions, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_calibration(write(tmp_path, LONG), bundle, options)


def test_a_missing_file_is_named(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no\.txt"):
        read_calibration(tmp_path / "no.txt", bundle)
