"""Text to tokens and back: `tokenizer.json` with the special tokens that the files beside it name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvgraph.runtime.text import Detokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
MODEL_CONFIG = "config.json"

_ID_STOP = 2**32  # the library keeps ids in 32 bits


class Tokenizer:
    """A tokenizer and the ids that begin and end its texts.

    Args:
        backend: The `tokenizers` object.
        bos_token_id: Id that begins a text, None where there is none.
        eos_token_ids: Ids of which any ends a text.

    Attributes:
        backend: The `tokenizers` object, with truncation and padding switched off.
        bos_token_id: Id that begins a text, or None.
        eos_token_ids: Ids of which any ends a text, in ascending order.
        adds_bos: Whether `encode` puts the BOS before a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        # Some tokenizer.json files carry the settings of their training, which would cut prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_token_id = bos_token_id
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        first, plain = (backend.encode("a", add_special_tokens=added).ids[:1] for added in (True, False))
        self.adds_bos = bos_token_id is not None and first == [bos_token_id] != plain

    @classmethod
    def load(cls, directory: str | Path, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """The tokenizer of a checkpoint or a bundle.

        A text begins with what tokenizer_config.json names, else generation_config.json, else the model's config;
        it ends with any id that any of the three names.

        Args:
            directory: Holds tokenizer.json and, optionally, the other files.
            config: The model's config; default: config.json of the directory, if there is one.

        Raises:
            FileNotFoundError: There is no tokenizer.json.
            ValueError: A file cannot be read, or names a token that the vocabulary does not have.
        """
        directory = Path(directory)
        path = directory / TOKENIZER
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; give the prompt as token ids, or add the file")
        backend = _read_backend(path)
        named = read_json(directory / TOKENIZER_CONFIG)
        generation = read_json(directory / GENERATION_CONFIG)
        model = read_json(directory / MODEL_CONFIG) if config is None else config
        bos = _named_token(backend, named, "bos_token", directory)
        eos = _named_token(backend, named, "eos_token", directory)
        for source in (generation, model):
            ids = _ids(source, "bos_token_id")
            bos = ids[0] if bos is None and ids else bos
        ends = _ids(generation, "eos_token_id") + _ids(model, "eos_token_id") + _ids(model, "eos_token_ids")
        return cls(backend, bos, ends if eos is None else [eos, *ends])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text.

        Args:
            text: Special tokens spelled in it ("<s>") become their ids.
            add_special_tokens: Add what the tokenizer puts around a text. A BOS that the text already has is not
                doubled. Rendered chats have all of theirs: encode them without.

        Raises:
            ValueError: The text holds half a surrogate pair, as bytes that are not UTF-8 leave it.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text is not valid Unicode at character {error.start}; give it as UTF-8"
            ) from error
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids, the same that a `Detokenizer` gives token by token.

        Malformed bytes become U+FFFD; ids that the vocabulary does not know are left out.
        """
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.push(token) for token in token_ids]) + detokenizer.flush()

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Byte of each byte-fallback token; empty for other kinds of vocabulary."""
        names = {byte: self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        letter = names[ord("A")]
        # Such names alone prove nothing: the decoder must take them for bytes.
        if letter is None or self.backend.decode([letter]) != "A":
            return {}
        return {token: byte for byte, token in names.items() if token is not None}

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are not part of the text."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def has_token(self, token_id: int) -> bool:
        """Whether the vocabulary knows the id (a model's may be padded)."""
        return 0 <= token_id < _ID_STOP and self.backend.id_to_token(token_id) is not None

    def decode_tokens(self, token_ids: Sequence[int]) -> str:
        """What the library makes of the tokens, special ones included."""
        return self.backend.decode(token_ids, skip_special_tokens=False)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        if (
            type(error) is not Exception
        ):  # the library raises a plain Exception for whatever is wrong with the file
            raise
        raise ValueError(f"{path}: not a tokenizer that this version of tokenizers reads: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: holds a {type(data).__name__}, expected an object")
    return data


def _named_token(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], key: str, directory: Path
) -> int | None:
    token = config.get(key)
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    token_id = backend.token_to_id(token)
    if token_id is None:
        raise ValueError(
            f"{directory / TOKENIZER_CONFIG}: {key} is {token!r}, which {TOKENIZER} does not have; "
            "the two files are of different tokenizers"
        )
    return token_id


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    """An id, a list of ids or nothing, as a list."""
    value = config.get(key)
    if value is None:
        return []
    ids = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
        raise ValueError(f"{key} is {value!r}, expected an integer or a list of integers")
    return ids
