"""The tokenizer in the metadata of a GGUF file, as the files that a Hugging Face checkpoint has."""

from __future__ import annotations

import json
from typing import Any

from kvgraph.models.gguf_file import GGUFFile
from kvgraph.models.gguf_tokenizer_models import build_tokenizer
from kvgraph.models.gguf_vocabulary import Vocabulary, read_vocabulary

CHAT_TEMPLATE = "tokenizer.chat_template"
# Roles whose tokens end a text: the text itself, a turn of a chat, a message to a tool.
_ENDS = ("eos", "eot", "eom")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """The content of generation_config.json: which tokens begin and end a text."""
    ids = {role: file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", *_ENDS)}
    ends = dict.fromkeys(ids[role] for role in _ENDS if ids[role] is not None)
    config = {"bos_token_id": ids["bos"], "eos_token_id": list(ends) or None}
    return {key: value for key, value in config.items() if value is not None}


def tokenizer_files(file: GGUFFile) -> dict[str, str]:
    """Name -> content of tokenizer.json and what goes with it; empty where the file has no vocabulary.

    Raises:
        ValueError: The vocabulary is not complete, or of a kind that is not implemented.
    """
    vocabulary = read_vocabulary(file)
    if vocabulary is None:
        return {}
    config = _tokenizer_config(vocabulary)
    files = {"tokenizer.json": build_tokenizer(vocabulary).to_str()}
    templates = _chat_templates(file)
    if list(templates) == ["default"]:
        files["chat_template.jinja"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return {**files, "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False)}


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    named = {key: vocabulary.token(role) for key, role in _NAMED.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{key: token for key, token in named.items() if token is not None},
    }


def _chat_templates(file: GGUFFile) -> dict[str, str]:
    """Name -> text; models may have others beside the default one, for tools."""
    templates = {}
    for key, text in file.metadata.items():
        if key == CHAT_TEMPLATE or key.startswith(f"{CHAT_TEMPLATE}."):
            if not isinstance(text, str):
                raise ValueError(f"{file.path}: {key} is {type(text).__name__}, expected a text")
            templates[key.removeprefix(CHAT_TEMPLATE).removeprefix(".") or "default"] = text
    return templates
