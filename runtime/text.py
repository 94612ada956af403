"""Tokens to text as they come: an incremental detokenizer and stop strings.

A character may be spread over several tokens, in two ways. In byte-level vocabularies (GPT-2) any token may begin
or end inside a character; the `tokenizers` library decodes the unfinished end to one U+FFFD. In vocabularies with
byte fallback (SentencePiece) a character that has no token of its own is spelled by tokens `<0x00>`...`<0xFF>`;
the library decodes a run of them to one U+FFFD a byte if *any* of its bytes is malformed, so that text already
shown would have to be taken back. Such runs are therefore decoded here, byte by byte: good characters as soon as
they are whole, one U+FFFD for each byte that cannot be part of one. Well-formed text comes out as from the library.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

UNDECODABLE = "\ufffd"

# Tokens kept to decode the next one in their context. An unfinished character is at most 3 bytes, so at most
# 3 tokens, long; one more keeps the rule of a leading space from seeing a start of text.
_CONTEXT = 4
# The window is cut back to the context when it reaches this length: the cost of a token does not grow.
_WINDOW = 16


class Vocabulary(Protocol):
    """What the detokenizer asks of a tokenizer."""

    @property
    def byte_tokens(self) -> dict[int, int]:
        """Byte of each byte-fallback token; empty for other kinds of vocabulary."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are not part of the text."""
        ...

    def has_token(self, token_id: int) -> bool:
        """Whether the vocabulary knows the id (a model's may be padded)."""
        ...

    def decode_tokens(self, token_ids: Sequence[int]) -> str:
        """What the library makes of the tokens, special ones included."""
        ...


class Detokenizer:
    """Text of one row, token by token.

    The texts that `push` returned and that of `flush` make the decoded text. `push` never returns a part of a
    character, nor U+FFFD for bytes that may still become one.

    Args:
        vocabulary: The tokenizer.
        prompt: Tokens before the first one; they decide whether its leading space is kept.
        skip_special_tokens: Leave special tokens out of the text.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_token_ids if skip_special_tokens else frozenset()
        self._byte_tokens = vocabulary.byte_tokens
        self._bytes = bytearray()
        self._window: list[int] = []
        self._shown = 0  # characters of the decoded window that are already out
        for token in self._context_of(prompt):
            self.push(token)

    def push(self, token_id: int) -> str:
        """The text that is certain with one more token."""
        if token_id in self._skipped or not self._vocabulary.has_token(token_id):
            return ""
        byte = self._byte_tokens.get(token_id)
        # An ASCII byte at the start of a text is left to the library, which may strip a leading space.
        if byte is None or (byte < 0x80 and not self._window):
            return self._take_bytes(final=True) + self._push_token(token_id)
        self._bytes.append(byte)
        # Context for the next ordinary token. A byte token stands apart from it, whatever it decodes to.
        self._window = [token_id]
        self._shown = len(self._vocabulary.decode_tokens(self._window))
        return self._take_bytes(final=False)

    def flush(self) -> str:
        """What was held back; an unfinished character becomes U+FFFD."""
        rest = self._vocabulary.decode_tokens(self._window)[self._shown :]
        self._shown += len(rest)
        return self._take_bytes(final=True) + rest

    def _context_of(self, prompt: Sequence[int]) -> list[int]:
        context: deque[int] = deque()
        for token in reversed(prompt):
            if token not in self._skipped and self._vocabulary.has_token(token):
                context.appendleft(token)
            if len(context) == _CONTEXT:
                break
        return list(context)

    def _push_token(self, token_id: int) -> str:
        self._window.append(token_id)
        decoded = self._vocabulary.decode_tokens(self._window)
        # Only the last character can be unfinished, and none where unfinished ones are made of byte tokens.
        held = int(decoded.endswith(UNDECODABLE) and not self._byte_tokens)
        text = decoded[self._shown : len(decoded) - held]
        self._shown = max(self._shown, len(decoded) - held)
        if len(self._window) >= _WINDOW:
            self._window = self._window[-_CONTEXT:]
            self._shown = len(self._vocabulary.decode_tokens(self._window)) - held
        return text

    def _take_bytes(self, *, final: bool) -> str:
        text = ""
        while self._bytes:
            try:
                text += self._bytes.decode("utf-8")
                self._bytes.clear()
            except UnicodeDecodeError as error:
                text += self._bytes[: error.start].decode("utf-8")
                del self._bytes[: error.start]
                malformed = error.end - error.start
                if malformed == len(self._bytes) and not final and error.reason == "unexpected end of data":
                    break
                text += UNDECODABLE * malformed
                del self._bytes[:malformed]
        return text


class StopMatcher:
    """Finds stop strings in a text that comes in pieces, and holds back only what may still become one.

    The stop that is complete first wins (of two that end together the longer one), so that the result does not
    depend on how the text is cut into tokens.

    Args:
        stop: One stop string, or several.

    Raises:
        ValueError: A stop string is empty.
    """

    def __init__(self, stop: str | Sequence[str]) -> None:
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stop:
            raise ValueError("a stop string is empty, expected at least one character")
        self._longest = max((len(text) for text in self._stop), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """What may be shown after one more piece, and whether a stop string ended the text."""
        if not self._stop:
            return text, False
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = self._possible_start(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
