"""The vocabulary in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType

from kvgraph.models.gguf_file import GGUFFile
from kvgraph.models.gguf_header import Value

# SentencePiece's space.
SPACE = "▁"
_PREFIX = "tokenizer.ggml."
_ROLE = "_token_id"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id, and what there is to know of each.

    Attributes:
        path: The file that it is from.
        model: Kind of tokenizer, "llama" for SentencePiece or "gpt2" for byte-level BPE.
        pre: Kind of pre-tokenizer, None where the file names none.
        tokens: Text of every token, none twice.
        types: `TokenType` of every token.
        scores: Of every token, the higher the earlier it is merged; () where the file has none.
        merges: Pairs of tokens in the order in which they are merged.
        ids: Role, "bos", "eos", "eot" and so on -> id of the token in it.
        flags: Switch, "add_bos_token" and so on -> whether it is on; only those that the file has.
    """

    path: Path
    model: str
    pre: str | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    ids: Mapping[str, int]
    flags: Mapping[str, bool]

    def of_types(self, *types: TokenType) -> list[str]:
        """Tokens of any of these types, by id."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in types]

    def token(self, role: str) -> str | None:
        """The token in a role, None where there is none."""
        return self.tokens[self.ids[role]] if role in self.ids else None


def read_vocabulary(file: GGUFFile) -> Vocabulary | None:
    """The vocabulary, None where the file has none.

    Raises:
        ValueError: It is not complete, or contradicts itself.
    """
    settings = {
        key.removeprefix(_PREFIX): value for key, value in file.metadata.items() if key.startswith(_PREFIX)
    }
    model, pre = settings.get("model"), settings.get("pre")
    if model is None or model in ("none", "no_vocab"):
        return None
    if not isinstance(model, str) or not isinstance(pre, str | None):
        raise ValueError(f"{file.path}: {_PREFIX}model is {model!r} and pre is {pre!r}, expected names")
    tokens = _strings(file.path, settings, "tokens")
    types = _numbers(file.path, settings, "token_type", len(tokens))
    if model == "llama":
        tokens = [_spaced(token, kind) for token, kind in zip(tokens, types, strict=True)]
    _refuse_repeated(file.path, tokens)
    return Vocabulary(
        path=file.path,
        model=model,
        pre=pre,
        tokens=tuple(tokens),
        types=tuple(types),
        scores=tuple(_numbers(file.path, settings, "scores", len(tokens))) if "scores" in settings else (),
        merges=tuple(
            _pair(file.path, merge) for merge in _strings(file.path, settings, "merges", optional=True)
        ),
        ids=_read_ids(file.path, settings, len(tokens)),
        flags={key: value for key, value in settings.items() if isinstance(value, bool)},
    )


def _strings(path: Path, settings: Mapping[str, Value], key: str, *, optional: bool = False) -> list[str]:
    values = settings.get(key, [] if optional else None)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{path}: {_PREFIX}{key} is missing or no list of strings")
    return [str(value) for value in values]


def _numbers(path: Path, settings: Mapping[str, Value], key: str, length: int) -> list[Any]:
    values = settings.get(key)
    if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
        raise ValueError(f"{path}: {_PREFIX}{key} is missing or no list of numbers")
    if len(values) != length:
        raise ValueError(
            f"{path}: {_PREFIX}{key} has {len(values)} values, expected one for each of {length} tokens"
        )
    return values


def _spaced(token: str, kind: int) -> str:
    """What a token stands for in a text: early converters left SentencePiece's spaces in those that users defined."""
    return token.replace(SPACE, " ") if kind == TokenType.USER_DEFINED and token != SPACE else token


def _refuse_repeated(path: Path, tokens: list[str]) -> None:
    ids: dict[str, int] = {}
    for id_, token in enumerate(tokens):
        if token in ids:
            raise ValueError(
                f"{path}: tokens {ids[token]} and {id_} are both {token!r}; a text has one token"
            )
        ids[token] = id_


def _pair(path: Path, merge: str) -> tuple[str, str]:
    # A space within a token is spelled otherwise, so the one there is parts the two.
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ValueError(f"{path}: {_PREFIX}merges holds {merge!r}, expected two tokens with a space between")
    return left, right


def _read_ids(path: Path, settings: Mapping[str, Value], count: int) -> dict[str, int]:
    ids = {}
    for key, value in settings.items():
        if not key.endswith(_ROLE):
            continue
        if not isinstance(value, int) or not 0 <= value < count:
            raise ValueError(f"{path}: {_PREFIX}{key} is {value!r}, expected the id of one of {count} tokens")
        ids[key.removesuffix(_ROLE)] = value
    return ids
