"""The post-norm decoder block of the textbooks: layer norms behind each sum, multi-head attention with biases.

For people who wrote their own. The checkpoint is a directory with model.safetensors and this config.json:

    {
      "model_type": "post_norm_decoder",
      "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048,
      "num_hidden_layers": 6, "num_attention_heads": 8,
      "max_position_embeddings": 1024,
      "layer_norm_eps": 1e-5,
      "positions": "sinusoidal", "scale_embeddings": true,
      "ffn": "plain", "hidden_act": "gelu",
      "tie_word_embeddings": false
    }

| key | values |
|---|---|
| `positions` | "sinusoidal" (sin, cos in turn), "learned", or "rotary" with `rope_theta` and `rope_interleaved` |
| `scale_embeddings` | whether token embeddings are multiplied by sqrt(E) |
| `ffn` | "plain": w2 act(w1 x + b1) + b2; "swiglu": w3 (silu(w1 x) * w2 x), without biases |
| `hidden_act` | of the plain form: "gelu" is the one with erf, "gelu_pytorch_tanh" the one with tanh; or "relu" |
| `head_bias` | whether there is a `head.bias` (false); not with a tied head |

`head_dim` is `hidden_size` / `num_attention_heads` unless it is given; `bos_token_id`, `eos_token_id` and `dtype` are
read as for Llama.

| tensor | shape |
|---|---|
| `embed.weight` | [V, E] |
| `positions.weight`, for learned positions | [max_position_embeddings, E] |
| `blocks.{i}.attn.wq`, `.wk`, `.wv`: `.weight`, `.bias` | [H * D, E], [H * D] |
| `blocks.{i}.attn.wo`: `.weight`, `.bias` | [E, H * D], [E] |
| `blocks.{i}.norm1`, `blocks.{i}.norm2`: `.weight`, `.bias` | [E], [E] |
| `blocks.{i}.ffn.w1`, plain: `.weight`, `.bias`; of swiglu also `w2`, and no bias | [F, E], [F] |
| `blocks.{i}.ffn.w2` (plain): `.weight`, `.bias`; `blocks.{i}.ffn.w3` (swiglu): `.weight` | [E, F], [E] |
| `head.weight`, unless tied; `head.bias` | [V, E], [V] |

A layer is x = norm1(x + attn(x)), x = norm2(x + ffn(x)); the head reads what the last one leaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, DecoderLayer, Head, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import renamed, token_embedding
from kvgraph.models.layers import MLP, Attention, Cast, Embedding, GatedMLP, Linear, Precision
from kvgraph.models.learned_positions import LearnedPositionsPrelude
from kvgraph.models.positions import CausalMask, Rotary, Shared
from kvgraph.models.rope import RopeConfig, read_rope
from kvgraph.models.sinusoidal_positions import SinusoidalPrelude

POSITIONS = ("sinusoidal", "learned", "rotary")
FFNS = ("plain", "swiglu")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormConfig(ModelConfig):
    """The post-norm decoder's configuration.

    Attributes:
        layer_norm_eps: Epsilon of every layer norm.
        positions: One of `POSITIONS`.
        rope: The rotary embedding, where `positions` is "rotary".
        rope_interleaved: Whether the pairs that it turns are neighbours.
        scale_embeddings: Whether token embeddings are multiplied by sqrt(E).
        ffn: One of `FFNS`.
        head_bias: Whether the head has a bias.
    """

    layer_norm_eps: float
    positions: str
    rope: RopeConfig | None
    rope_interleaved: bool
    scale_embeddings: bool
    ffn: str
    head_bias: bool

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        longest = self.max_position_embeddings
        return longest if self.rope is None else self.rope.stretched(longest)


def config_from_hf(hf: Mapping[str, Any]) -> PostNormConfig:
    """Read the config.json of the module docstring.

    Raises:
        ValueError: A key is missing, malformed or unknown, or two contradict each other.
    """
    reader = ConfigReader(hf)
    positions, ffn = read_choice(reader, "positions", POSITIONS), read_choice(reader, "ffn", FFNS)
    swiglu, tied = ffn == "swiglu", reader.flag("tie_word_embeddings")
    if swiglu:
        reader.require("hidden_act", "silu", "that is what swiglu means")
    common = read_common(reader, hidden_act="silu" if swiglu else None, tie_word_embeddings=tied)
    heads = common["num_attention_heads"]
    reader.require("num_key_value_heads", heads, "heads do not share keys in this family")
    if positions == "sinusoidal" and common["hidden_size"] % 2:
        raise reader.error(
            f"hidden_size is {common['hidden_size']}, expected an even number for sinusoidal positions"
        )
    rotary = positions == "rotary"
    config = PostNormConfig(
        **common,
        layer_norm_eps=reader.number("layer_norm_eps"),
        positions=positions,
        rope=read_rope(reader, common["head_dim"]) if rotary else None,
        rope_interleaved=reader.flag("rope_interleaved") if rotary else False,
        scale_embeddings=reader.flag("scale_embeddings"),
        ffn=ffn,
        head_bias=reader.flag("head_bias", default=False),
    )
    if config.head_bias and tied:
        raise reader.error("head_bias and tie_word_embeddings are both true, which is not implemented")
    reader.refuse_unread(config.model_type)
    return config


def read_choice(reader: ConfigReader, key: str, known: tuple[str, ...]) -> str:
    """A string that is one of `known`."""
    value = reader.text(key)
    if value not in known:
        raise reader.error(f"{key} is {value!r}, expected one of {', '.join(known)}")
    return value


class PostNormLayer(DecoderLayer):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, config: PostNormConfig, precision: Precision) -> None:
        super().__init__()
        size, inner, compute = config.hidden_size, config.intermediate_size, precision.compute
        rotary = ("cos", "sin") if config.positions == "rotary" else ()
        self.shared = ("mask", *rotary)
        self.compute = compute
        self.self_attn = Attention(
            config, precision, qkv_bias=True, out_bias=True, interleaved=config.rope_interleaved
        )
        self.kv_shape = self.self_attn.kv_shape
        # The norm's result is the stream itself.
        self.post_attention_layernorm = LayerNorm(size, config.layer_norm_eps, precision.residual)
        plain = config.ffn == "plain"
        self.mlp = (
            MLP(size, inner, config.hidden_act, True, precision)
            if plain
            else GatedMLP(size, inner, config.hidden_act, False, precision)
        )
        self.post_feedforward_layernorm = LayerNorm(size, config.layer_norm_eps, precision.residual)

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        *shared: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `DecoderLayer`."""
        attended, key, value = self.self_attn(
            hidden_states.to(self.compute), past_length, past_key, past_value, *shared
        )
        hidden_states = self.post_attention_layernorm(hidden_states + attended.to(hidden_states.dtype))
        fed_forward = self.mlp(hidden_states.to(self.compute))
        summed = hidden_states + fed_forward.to(hidden_states.dtype)
        return self.post_feedforward_layernorm(summed), key, value


def prelude(config: PostNormConfig, precision: Precision) -> Prelude:
    """Token embedding with the positions that the config asks for."""
    embed_tokens = token_embedding(config, precision)
    scale = math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0
    shared: list[Shared] = [CausalMask()]
    if config.positions == "sinusoidal":
        return SinusoidalPrelude(embed_tokens, shared, precision.residual, scale)
    if config.positions == "learned":
        table = Embedding(config.max_position_embeddings, config.hidden_size, precision.compute)
        return LearnedPositionsPrelude(embed_tokens, table, shared, precision.residual, scale)
    assert config.rope is not None
    shared.append(Rotary(config.rope, config.head_dim, precision.compute))
    return Prelude(embed_tokens, shared, precision.residual, scale)


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, PostNormConfig)
    compute = precision.compute
    first = prelude(config, precision)
    lm_head = (
        None
        if config.tie_word_embeddings
        else Linear(config.hidden_size, config.vocab_size, config.head_bias, compute)
    )
    layers = [PostNormLayer(config, precision) for _ in range(config.num_hidden_layers)]
    return Decoder(config, precision, first, layers, Head(Cast(compute), lm_head, first.embed_tokens))


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """The names of the module docstring."""
    assert isinstance(config, PostNormConfig)
    ffn = ("up", "down") if config.ffn == "plain" else ("gate", "up", "down")
    modules = {
        **{f"attn.w{name}": f"self_attn.{name}_proj" for name in "qkvo"},
        **{f"ffn.w{number}": f"mlp.{name}_proj" for number, name in enumerate(ffn, 1)},
        "norm1": "post_attention_layernorm",
        "norm2": "post_feedforward_layernorm",
    }
    return {
        "embed.weight": "model.embed_tokens.weight",
        "positions.weight": "model.embed_positions.weight",
        **renamed({"head": "lm_head"}),
        **renamed(modules, "blocks.{i}.", "model.layers.{i}."),
    }


FAMILY = Family("post_norm_decoder", config_from_hf, build, weight_names)
