"""What a model is, in numbers: the part of config.json that decides what the graph computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.rope import RopeConfig, read_rope

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's configuration under Hugging Face field names, complete and checked.

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
        rms_norm_eps: Epsilon of every RMS norm.
        hidden_act: Activation of the feed-forward part, by its Hugging Face name.
        attention_bias: Whether the q, k, v and o projections have biases.
        mlp_bias: Whether the gate, up and down projections have biases.
        tie_word_embeddings: Whether the head is the embedding table.
        rope: The rotary embedding.
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
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: RopeConfig
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
    def num_key_value_groups(self) -> int:
        """H / K, the query heads that share a key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """The configuration that a Hugging Face config.json describes.

        Raises:
            ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
        """
        # Imported here since every family imports this module.
        from kvgraph.models.family import family

        return family(ConfigReader(hf).text("model_type")).config_from_hf(hf)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {**asdict(self), "eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Read what `to_json` wrote.

        Raises:
            ValueError: The fields are not those of this version.
        """
        known = {field.name for field in fields(cls)}
        if set(data) != known:
            raise ValueError(
                f"model configuration: missing {sorted(known - set(data))}, unknown {sorted(set(data) - known)}; "
                "use the kvgraph that wrote it"
            )
        rope = RopeConfig.from_json(data["rope"])
        return cls(**{**data, "rope": rope, "eos_token_ids": tuple(data["eos_token_ids"])})


def read_llama_like(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a `llama` config.json.

    Defaults are those of transformers' LlamaConfig, and only for keys that published checkpoints leave out.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    model_type = reader.text("model_type")
    heads = reader.integer("num_attention_heads")
    head_dim = read_head_dim(reader)
    config = ModelConfig(
        model_type=model_type,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        num_hidden_layers=reader.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=reader.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        max_position_embeddings=reader.integer("max_position_embeddings"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        hidden_act=reader.text("hidden_act", default="silu"),
        attention_bias=reader.flag("attention_bias", default=False),
        mlp_bias=reader.flag("mlp_bias", default=False),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        rope=read_rope(reader, head_dim, default_theta=10000.0),
        bos_token_id=read_bos_token_id(reader, default=1),
        eos_token_ids=reader.token_ids("eos_token_id", default=(2,)),
        dtype=read_dtype(reader),
    )
    reader.refuse_unread(model_type)
    return config


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
