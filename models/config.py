"""What a model is, in numbers: the part of config.json that decides what the graph computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kvgraph.models.config_reader import ConfigReader

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What every decoder's configuration has, under Hugging Face field names, complete and checked.

    A family's own class adds what only that family has; none of the fields has a default.

    Attributes:
        model_type: The family, as `models/families/<model_type>.py`.
        vocab_size: V.
        hidden_size: E.
        intermediate_size: Width of the feed-forward part.
        num_hidden_layers: Layers.
        num_attention_heads: H.
        num_key_value_heads: K; query head h reads key/value head h // (H / K).
        head_dim: D, not necessarily E / H.
        max_position_embeddings: Positions that the model was made for.
        hidden_act: Activation of the feed-forward part, by its Hugging Face name.
        tie_word_embeddings: Whether the head is the embedding table.
        bos_token_id: Token that opens a text, if there is one.
        eos_token_ids: Tokens that end a text, as config.json names them.
        dtype: Type that the checkpoint asks to be loaded in; None where config.json does not say.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    hidden_act: str
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def max_positions(self) -> int:
        """Positions that a sequence may have; more than the model was made for where its rope stretches them."""
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """The configuration that a Hugging Face config.json describes, read by its family.

        Raises:
            ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
        """
        # Imported here since every family imports this module.
        from kvgraph.models.family import family

        return family(ConfigReader(hf).text("model_type")).config_from_hf(hf)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values; tuples become lists."""
        data: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return data


def read_common(
    reader: ConfigReader,
    *,
    hidden_act: str | None = None,
    tie_word_embeddings: bool = False,
    bos_token_id: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
    intermediate_size: int | None = None,
    max_position_embeddings: int | None = None,
) -> dict[str, Any]:
    """The fields of `ModelConfig` from a config.json that spells them as Llama does.

    Args:
        reader: config.json.
        hidden_act: What the family's transformers class takes where the key is left out; None makes it required.
        tie_word_embeddings: Likewise.
        bos_token_id: Likewise.
        eos_token_ids: Likewise.
        intermediate_size: Likewise.
        max_position_embeddings: Likewise.

    Raises:
        ValueError: A key is missing or malformed.
    """
    heads = reader.integer("num_attention_heads")
    return {
        "model_type": reader.text("model_type"),
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": reader.integer("hidden_size"),
        "intermediate_size": reader.integer("intermediate_size", default=intermediate_size),
        "num_hidden_layers": reader.integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("num_key_value_heads", default=heads),
        "head_dim": read_head_dim(reader),
        "max_position_embeddings": reader.integer("max_position_embeddings", default=max_position_embeddings),
        "hidden_act": reader.text("hidden_act", default=hidden_act),
        "tie_word_embeddings": reader.flag("tie_word_embeddings", default=tie_word_embeddings),
        "bos_token_id": read_bos_token_id(reader, default=bos_token_id),
        "eos_token_ids": reader.token_ids("eos_token_id", default=eos_token_ids),
        "dtype": read_dtype(reader),
    }


def read_head_dim(reader: ConfigReader) -> int:
    """D: `head_dim`, or `hidden_size` / `num_attention_heads` where the file leaves it out."""
    if reader.has("head_dim"):
        return reader.integer("head_dim")
    reader.value("head_dim")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden % heads:
        raise reader.error(f"head_dim is missing and hidden_size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def read_bos_token_id(reader: ConfigReader, default: int | None) -> int | None:
    """`bos_token_id`; None for null, `default` where the key is absent."""
    ids = reader.token_ids("bos_token_id", default=() if default is None else (default,))
    if len(ids) > 1:
        raise reader.error(f"bos_token_id is {list(ids)}, expected one token id")
    return ids[0] if ids else None


def read_dtype(reader: ConfigReader) -> str | None:
    """`dtype`, or `torch_dtype` as transformers 4 spells it, as one of `DTYPES`; None where it is not said."""
    if not reader.has("dtype", "torch_dtype"):
        return None
    name = reader.text("dtype", "torch_dtype").removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPES:
        raise reader.error(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return name
