"""A conversation over one cache: each turn feeds only what the cache does not hold yet."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Unpack

from kvgraph.runtime.chat import Message
from kvgraph.runtime.generate import stream
from kvgraph.runtime.generation import Event, Options
from kvgraph.runtime.model import Model


class Conversation:
    """Turns of a user and a model that has a chat template.

    Args:
        model: Who answers.
        messages: What was said before, a system message for instance.

    Attributes:
        messages: Everything said so far, with "role" and "content".
        prompt_tokens: Length of the latest prompt, the whole conversation.
        cached_tokens: How many of them the cache held already.

    Raises:
        ValueError: The model has no chat template.
    """

    def __init__(self, model: Model, messages: Sequence[Message] = ()) -> None:
        if model.chat_template is None:
            raise ValueError("the bundle has no chat template; give the whole text as a prompt instead")
        self.messages: list[Message] = list(messages)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._model = model
        self._cache = model.new_cache()
        self._fed: list[int] = []

    def send(self, text: str, **options: Unpack[Options]) -> Generator[Event, None, None]:
        """The model's answer, token by token; the conversation changes as it is read, and keeps what was read of it.

        Raises:
            ValueError: The conversation is too long for the cache, or the template does not accept it; it is as if
                nothing had been said then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self._model.encode_chat(messages)
        # The last token is fed in any case: its logits are wanted.
        cached = min(_common_length(self._fed, prompt), len(prompt) - 1)
        model = self._model
        events = stream(
            model.session, [prompt], model.params(options), model.tokenizer, self._cache, [cached]
        )
        return self._answer(messages, prompt, cached, events)

    def _answer(
        self, messages: list[Message], prompt: list[int], cached: int, events: Iterator[Event]
    ) -> Generator[Event, None, None]:
        self.prompt_tokens, self.cached_tokens = len(prompt), cached
        tokens: list[int] = []
        texts: list[str] = []
        self._fed = prompt[:cached]
        try:
            for event in events:
                if event.token_id is not None:
                    tokens.append(event.token_id)
                texts.append(event.text)
                yield event
        finally:
            if tokens:
                self._fed = prompt + tokens[:-1]  # the last one has not been fed
            self.messages = [*messages, {"role": "assistant", "content": "".join(texts)}]


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many elements both begin with."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
