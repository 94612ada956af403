"""The few verbs of the library: load a bundle, generate, stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Never, Unpack, overload

import numpy as np

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.chat import ChatTemplate, Message
from kvgraph.runtime.generate import generate, stream
from kvgraph.runtime.generation import Event, Generation, GenerationParams, Options
from kvgraph.runtime.open import open_session
from kvgraph.runtime.session import Cache, Ids, Session
from kvgraph.runtime.threads import Threads
from kvgraph.runtime.tokenizer import TOKENIZER, Tokenizer

_PROMPTS = "a text, token ids, or a list of texts or of lists of token ids"

# A text, or its token ids.
Prompt = str | Sequence[int] | Ids


@dataclass(frozen=True, slots=True)
class Model:
    """A session, and what turns texts into its tokens and back.

    Attributes:
        session: Runs the graphs.
        tokenizer: None where the bundle has none: prompts are token ids then, and texts are empty.
        chat_template: None where the model has none.
        eos_token_ids: Tokens of which any ends a text.
    """

    session: Session
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    eos_token_ids: tuple[int, ...] = ()

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation: ...

    @overload
    def generate(
        self, prompt: list[str] | list[list[int]], **options: Unpack[Options]
    ) -> list[Generation]: ...

    def generate(
        self, prompt: Prompt | list[str] | list[list[int]], **options: Unpack[Options]
    ) -> Generation | list[Generation]:
        """What the model writes after a prompt, or after each of several.

        Args:
            prompt: A text or token ids, or a list of texts or of lists of token ids.
            options: `kvgraph.Options`: temperature, top_k, top_p, min_p, repetition_penalty, seed, max_new_tokens,
                eos_token_ids, stop, logprobs, prefill_chunk, num_beams, length_penalty, early_stopping. Without any
                it takes the likeliest token, up to the end of the text or of the cache.

        Raises:
            TypeError: A prompt or an option is of another type, or an option is unknown.
            ValueError: One is out of its range. Nothing has been computed then.
        """
        params = self.params(options)
        session, prompts = self.begin(self.encode(prompt))
        generations = generate(session, prompts, params, self.tokenizer)
        return generations if _is_batch(prompt) else generations[0]

    def stream(
        self, prompt: Prompt | list[str] | list[list[int]], **options: Unpack[Options]
    ) -> Iterator[Event]:
        """The same, token by token, as a `kvgraph.Event` each; arguments and errors as for `generate`, raised at once.

        Example:
            for event in model.stream("Once upon a time", max_new_tokens=50):
                print(event.text, end="", flush=True)
        """
        params = self.params(options)
        session, prompts = self.begin(self.encode(prompt))
        return stream(session, prompts, params, self.tokenizer)

    def begin(self, prompts: Sequence[Any]) -> tuple[Session, Sequence[Any]]:
        """The session that goes on with encoded prompts, and what it goes on from."""
        return self.session, prompts

    def encode(self, prompt: Prompt | list[str] | list[list[int]]) -> list[Any]:
        """Token ids of each prompt; a text gets the BOS that its tokenizer adds.

        Raises:
            TypeError: Something is neither a text nor token ids.
            ValueError: It is a text, and there is no tokenizer.
        """
        prompts = _check_batch(prompt) if _is_batch(prompt) else [prompt]
        return [self._need_tokenizer().encode(text) if isinstance(text, str) else text for text in prompts]

    def encode_chat(self, messages: Sequence[Message], **variables: Any) -> list[int]:
        """Token ids of a conversation that the model is to go on with.

        Args:
            messages: With "role" and "content", oldest first.
            variables: Further arguments of `ChatTemplate.render`, such as tools.

        Raises:
            ValueError: The model has no chat template, or it does not accept the conversation.
        """
        if self.chat_template is None:
            raise ValueError("the bundle has no chat template; give the whole text as a prompt instead")
        text = self.chat_template.render(messages, **variables)
        return self._need_tokenizer().encode(text, add_special_tokens=False)

    def new_cache(self, batch_size: int = 1, limit: int | None = None) -> Cache:
        """An empty cache for `batch_size` rows of at most `limit` tokens (default: what the model allows)."""
        return self.session.allocate_cache(batch_size, limit)

    def params(self, options: Options) -> GenerationParams:
        """The parameters that options stand for, with the model's own end tokens where none are given."""
        params = GenerationParams.of(**options)
        if params.eos_token_ids is None:
            return replace(params, eos_token_ids=self.eos_token_ids)
        vocab_size = self.session.contract.vocab_size
        for token in params.eos_token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"eos_token_ids holds {token}, expected 0 <= id < {vocab_size}, the vocabulary"
                )
        return params

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"the bundle has no {TOKENIZER}; give the prompt as token ids")
        return self.tokenizer


def load(
    path: str | Path,
    target: str | None = None,
    *,
    device: str | None = None,
    threads: int | Threads | None = None,
    verify: bool = False,
    **unknown: Never,
) -> Model:
    """Open a bundle for generation.

    Args:
        path: The bundle's directory, a str or a Path.
        target: Name of what `kvgraph build` made of it; None runs the ONNX files themselves, or the one target that a
            bundle holds alone.
        device: "cpu", "cuda" or "cuda:1"; default "cpu", and "cuda" for targets that are made for a GPU.
        threads: What computes on a CPU: an int, the number of threads (default: one a core), or a `kvgraph.Threads`,
            which says also on which cores, and whether they spin while they wait.
        verify: A bool: hash all files, and not only compare their sizes.
        unknown: Nothing; what is given here is refused with the names that are known.

    Raises:
        FileNotFoundError: There is no such bundle, or no such target in it.
        ImportError: The runtime is not installed; the message names the extra to install.
        TypeError: An argument is unknown.
        ValueError: A file is damaged or does not fit the others, or the device does not suit the target.
        RuntimeError: The runtime does not load the graphs.

    Example:
        model = kvgraph.load("my-model")
        print(model.generate("Once upon a time", max_new_tokens=50).text)
        fast = kvgraph.load("my-model", "ort-cpu", threads=kvgraph.Threads(cores=(0, 1)))
    """
    if unknown:
        raise TypeError(
            f"load does not know {', '.join(sorted(unknown))}; known are target, device, threads, verify, and options "
            "of a text go to generate or stream"
        )
    bundle = Bundle.open(path, verify)
    tokenizer = Tokenizer.load(bundle.path, bundle.config) if TOKENIZER in bundle.files else None
    # A target that is alone is among the bundle's own files.
    unverified = verify and bundle.standalone is None
    model = Model(
        session=open_session(bundle, target, device, threads=threads, verify=unverified),
        tokenizer=tokenizer,
        chat_template=None if tokenizer is None else ChatTemplate.load(bundle.path, tokenizer),
        eos_token_ids=tuple(bundle.config["eos_token_ids"]) if tokenizer is None else tokenizer.eos_token_ids,
    )
    if bundle.contract.encoder is None:
        return model
    # Imported here since it is a kind of Model.
    from kvgraph.runtime.encoder_decoder_model import add_encoder

    return add_encoder(model, bundle)


def _is_batch(prompt: Any) -> bool:
    """Whether these are several prompts.

    Raises:
        TypeError: It is neither a prompt nor a sequence.
    """
    if isinstance(prompt, str):
        return False
    if isinstance(prompt, np.ndarray):
        return prompt.ndim > 1
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        raise TypeError(f"prompt is a {type(prompt).__name__}, expected {_PROMPTS}")
    # Token ids are numbers; an empty list is no prompt at all, not a prompt without tokens.
    return not any(isinstance(item, int | np.integer) for item in prompt)


def _check_batch(prompts: Any) -> Sequence[Any]:
    for place, prompt in enumerate(prompts):
        if isinstance(prompt, bytes) or not isinstance(prompt, Sequence | np.ndarray):
            raise TypeError(f"prompt {place} is a {type(prompt).__name__}, expected a text or token ids")
    checked: Sequence[Any] = prompts
    return checked
