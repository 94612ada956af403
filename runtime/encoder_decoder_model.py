"""A model with an encoder behind the verbs of the library: a prompt is the encoder's source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.encoder_session import has_encoder
from kvgraph.runtime.generation import GenerationParams, Options
from kvgraph.runtime.model import Model
from kvgraph.runtime.session import Session
from kvgraph.runtime.sources import SourcedSession, encode_sources
from kvgraph.runtime.token_rules import TokenRules, read_token_rules
from kvgraph.runtime.tokenizer import GENERATION_CONFIG, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderModel(Model):
    """An encoder-decoder model, used as any other: `generate("translate English to German: ...")`.

    Attributes:
        decoder_start_token_id: What every row of the decoder begins with.
        rules: Which tokens are forced or forbidden.
    """

    decoder_start_token_id: int
    rules: TokenRules

    def params(self, options: Options) -> GenerationParams:
        """See `Model.params`."""
        # A dataclass with slots is made anew, so that a bare super() would look at another class.
        return replace(Model.params(self, options), rules=self.rules)

    def begin(self, prompts: Sequence[Any]) -> tuple[Session, list[Any]]:
        """A session that has encoded the prompts, and the start of the decoder's rows."""
        assert has_encoder(self.session)
        session = SourcedSession(self.session, encode_sources(self.session, prompts))
        return session, [[self.decoder_start_token_id]] * len(prompts)


def add_encoder(model: Model, bundle: Bundle) -> EncoderDecoderModel:
    """The model of a bundle with an encoder.

    Raises:
        ValueError: The bundle does not say what the decoder begins with, or a generation setting is not implemented.
    """
    return EncoderDecoderModel(
        session=model.session,
        tokenizer=model.tokenizer,
        chat_template=model.chat_template,
        eos_token_ids=model.eos_token_ids,
        decoder_start_token_id=read_decoder_start(bundle),
        rules=read_rules(bundle),
    )


def read_rules(bundle: Bundle) -> TokenRules:
    """Which tokens a bundle's generation settings force or forbid.

    Raises:
        ValueError: A setting is malformed or not implemented.
    """
    generation = read_json(bundle.path / GENERATION_CONFIG)
    return read_token_rules(generation, bundle.config, bundle.contract.vocab_size)


def read_decoder_start(bundle: Bundle) -> int:
    """The token that a decoder begins with: `decoder_start_token_id`, or else the BOS.

    Raises:
        ValueError: Neither is named, or it is no token of the vocabulary.
    """
    key, generation = "decoder_start_token_id", read_json(bundle.path / GENERATION_CONFIG)
    named = (generation.get(key), bundle.config.get(key), bundle.config.get("bos_token_id"))
    start = next((token for token in named if token is not None), None)
    if not isinstance(start, int) or not 0 <= start < bundle.contract.vocab_size:
        raise ValueError(
            f"{bundle.path}: {key} is {start!r}, expected a token id below {bundle.contract.vocab_size}; add it to "
            "the checkpoint's generation_config.json and export again"
        )
    return start
