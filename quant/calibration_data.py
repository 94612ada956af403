"""Token sequences to calibrate on, from texts, chats or token ids.

| file | samples |
|---|---|
| `.jsonl` | one a line: a text, `{"text": ...}`, a list of messages, or `{"messages": [...]}` |
| `.npy` | rows of an integer array [N, L], or pieces of one [L] |
| any other | UTF-8 text: its blocks, where empty lines part them; else its lines |

Texts get the special tokens that the tokenizer adds, chats those of the model's template. A text longer than
`sequence_length` is cut into pieces, each of which begins as a text does; a chat is cut short, for its pieces would not
be chats.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.chat import ChatTemplate
from kvgraph.runtime.session import Ids
from kvgraph.runtime.tokenizer import Tokenizer

# Fewer tokens than this, in all, say nothing about a model.
LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """How much of a file is used.

    Attributes:
        samples: Most sequences.
        sequence_length: Most tokens of one.
        seed: Which of the file's sequences, where it has more.
    """

    samples: int = 128
    sequence_length: int = 512
    seed: int = 0


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """Sequences of token ids, longest first.

    Attributes:
        sequences: [n] int64 each.
        source: Where they come from.
    """

    sequences: tuple[Ids, ...]
    source: str

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(len(ids) for ids in self.sequences)

    def digest(self) -> str:
        """sha256 of the sequences."""
        found = hashlib.sha256()
        for ids in self.sequences:
            found.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids, "<i8").tobytes())
        return found.hexdigest()


def read_calibration(
    path: str | Path, bundle: Bundle, options: CalibrationOptions | None = None
) -> CalibrationData:
    """The sequences that a file offers a model.

    Args:
        path: See the module's docstring.
        bundle: Whose tokenizer, chat template and vocabulary.
        options: See `CalibrationOptions`.

    Raises:
        FileNotFoundError: There is no such file, or the bundle has no tokenizer and the file holds text.
        ValueError: The file is empty, too short, malformed, or holds tokens that the model does not know.
    """
    if bundle.contract.encoder is not None:
        raise ValueError(
            f"{bundle.path}: has an encoder, for which calibration is not implemented; take a weight-only recipe that "
            "rounds to nearest, such as int8-wo, and leave --calibration out"
        )
    path, options = Path(path), options or CalibrationOptions()
    _check_options(options, bundle)
    is_ids = path.suffix == ".npy"
    sequences = _read_ids(path, options) if is_ids else _read_texts(path, bundle, options)
    # A token that stands alone, after a BOS or not, is followed and preceded by nothing.
    sequences = [ids for ids in sequences if len(ids) > 1]
    if len(sequences) > options.samples:
        chosen = np.random.default_rng(options.seed).permutation(len(sequences))[: options.samples]
        sequences = [sequences[index] for index in sorted(chosen)]
    return check_sequences(sequences, bundle, str(path))


def check_sequences(sequences: Sequence[Ids], bundle: Bundle, source: str) -> CalibrationData:
    """Sequences as calibration data.

    Args:
        sequences: [n] integers each.
        bundle: The model that will read them.
        source: Where they come from, for messages.

    Raises:
        ValueError: There are too few tokens, or some that the model does not know.
    """
    total = sum(len(ids) for ids in sequences)
    if total < LEAST_TOKENS:
        raise ValueError(
            f"{source}: {total} tokens in {len(sequences)} sequences of two or more, expected at least "
            f"{LEAST_TOKENS} to calibrate on; give a longer file, or raise --samples or --sequence-length"
        )
    vocab_size = bundle.contract.vocab_size
    for index, ids in enumerate(sequences):
        if (unknown := ids[(ids < 0) | (ids >= vocab_size)]).size:
            raise ValueError(
                f"{source}: sequence {index} holds token id {unknown[0]}, expected 0 to {vocab_size - 1}; "
                "use data and tokenizer of this model"
            )
    ordered = sorted((ids.astype(np.int64) for ids in sequences), key=len, reverse=True)
    return CalibrationData(tuple(ordered), source)


def _check_options(options: CalibrationOptions, bundle: Bundle) -> None:
    limit = bundle.contract.capacity or bundle.contract.max_positions
    if not 2 <= options.sequence_length <= limit:
        raise ValueError(
            f"sequence_length is {options.sequence_length}, expected 2 to {limit}, the positions of the model"
        )
    if options.samples < 1:
        raise ValueError(f"samples is {options.samples}, expected 1 or more")


def _read_ids(path: Path, options: CalibrationOptions) -> list[Ids]:
    try:
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: not a NumPy array of token ids ({error})") from error
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{path}: holds NaN or infinite values, expected token ids")
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise ValueError(
            f"{path}: an array of {array.dtype} with shape {list(array.shape)}, expected integers [N, L] or [L]"
        )
    rows = array if array.ndim == 2 else array[None]
    length = options.sequence_length
    return [row[at : at + length].astype(np.int64) for row in rows for at in range(0, len(row), length)]


def _read_texts(path: Path, bundle: Bundle, options: CalibrationOptions) -> list[Ids]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    if not text.strip():
        raise ValueError(f"{path}: the file is empty; give text of the kind that the model will meet")
    tokenizer = Tokenizer.load(bundle.path, bundle.config)
    samples = _json_lines(path, text) if path.suffix == ".jsonl" else iter(_blocks(text))
    template = None
    sequences: list[Ids] = []
    for sample in samples:
        if isinstance(sample, str):
            sequences += _pieces(tokenizer, sample, options.sequence_length)
            continue
        template = template or ChatTemplate.load(bundle.path, tokenizer)
        if template is None:
            raise ValueError(f"{path}: holds chats, but the bundle has no chat template; give texts instead")
        rendered = template.render(sample, add_generation_prompt=False)
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        sequences.append(np.array(ids[: options.sequence_length], np.int64))
    return sequences


def _blocks(text: str) -> list[str]:
    """The parts between empty lines; where there are none, the lines."""
    text = text.replace("\r\n", "\n").strip()
    blocks = re.split(r"\n[^\S\n]*\n\s*", text)
    return blocks if len(blocks) > 1 else text.split("\n")


def _json_lines(path: Path, text: str) -> Iterator[str | list[Any]]:
    """A text or a list of messages for each line."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} is not valid JSON ({error})") from error
        if isinstance(value, dict):
            value = value.get("messages", value.get("text"))
        if not isinstance(value, str) and not _are_messages(value):
            raise ValueError(
                f'{path}: line {number} is neither a text nor a chat; expected {{"text": "..."}} or '
                '{"messages": [{"role": ..., "content": ...}, ...]}'
            )
        yield value


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)


def _pieces(tokenizer: Tokenizer, text: str, length: int) -> list[Ids]:
    """A text's ids, cut where they are more than `length`; every piece begins with the BOS, if the first does."""
    ids = tokenizer.encode(text)
    prefix = [tokenizer.bos_token_id] if tokenizer.adds_bos else []
    body = ids[len(prefix) :]
    step = length - len(prefix)
    return [np.array([*prefix, *body[at : at + step]], np.int64) for at in range(0, len(body), step)]
