"""Chat templates: a conversation to the text that the model was trained on.

A template is a Jinja program that comes with the model. It runs in Jinja's immutable sandbox, with the functions and
the settings that `transformers` gives it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvgraph.runtime.tokenizer import TOKENIZER_CONFIG, Tokenizer, read_json

CHAT_TEMPLATE = "chat_template.jinja"
DEFAULT, TOOL_USE = "default", "tool_use"

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat templates of a model.

    Args:
        templates: Name -> Jinja source; "default" is used unless tools are given and there is "tool_use".
        variables: What every template sees beside the conversation: the special tokens.

    Raises:
        ValueError: A template is not valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], variables: Mapping[str, str]) -> None:
        environment = _environment()
        self._variables = dict(variables)
        try:
            self._templates = {name: environment.from_string(text) for name, text in templates.items()}
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error

    @classmethod
    def load(cls, directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """The templates of a checkpoint or a bundle, None where it has none.

        chat_template.jinja comes before the `chat_template` of tokenizer_config.json, a text or a list of named ones.

        Raises:
            ValueError: A file cannot be read, or holds something else.
        """
        directory = Path(directory)
        config = read_json(directory / TOKENIZER_CONFIG)
        file = directory / CHAT_TEMPLATE
        found = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if found is None:
            return None
        return cls(_by_name(found, directory / TOKENIZER_CONFIG), _special_tokens(config, tokenizer))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation; it has all its special tokens, so encode it without adding any.

        Args:
            messages: With "role" and "content", oldest first.
            tools: JSON schemas of the functions that the model may call.
            documents: With "title" and "text".
            add_generation_prompt: End with the words that begin the model's turn.
            variables: Whatever else the template asks for.

        Raises:
            ValueError: The template does not accept the conversation.
        """
        template = self._templates.get(TOOL_USE) if tools is not None else None
        template = template or self._templates.get(DEFAULT)
        if template is None:
            raise ValueError(f"there is no chat template {DEFAULT!r}, only {', '.join(self._templates)}")
        # Templates test for a missing key, and would print None.
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        scope = {**self._variables, **variables, "messages": given, "tools": tools, "documents": documents}
        try:
            return template.render(scope, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template does not accept the conversation: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the model's own words for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes what HTML does not allow.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _by_name(found: Any, file: Path) -> dict[str, str]:
    """A template, or a list of named ones, as name -> text."""
    if isinstance(found, str):
        return {DEFAULT: found}
    try:
        named = {entry["name"]: entry["template"] for entry in found}
    except (KeyError, TypeError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ValueError(f"{file}: chat_template is neither a text nor a list of named templates")
    return named


def _special_tokens(config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    tokens = {}
    for key in _SPECIAL_TOKENS:
        token = config.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[key] = token
    if "bos_token" not in config and tokenizer.bos_token_id is not None:
        # Without it a template that writes the BOS would write nothing.
        tokens["bos_token"] = tokenizer.backend.id_to_token(tokenizer.bos_token_id) or ""
    return tokens
