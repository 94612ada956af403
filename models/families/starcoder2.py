"""StarCoder2: Llama's layer with layer norms, biases, a plain feed-forward part and a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import LAYER, layer_norm_decoder, renamed, token_embedding
from kvgraph.models.layers import MLP, Attention, Precision
from kvgraph.models.positions import CausalMask, Rotary, Shared
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rope import RopeConfig, read_rope

# Published files say some things twice, the second time as the family's training code does.
ALIASES = {"hidden_act": ("activation_function",), "norm_epsilon": ("layer_norm_epsilon",)}
WITHOUT_EFFECT = (
    # Dropout.
    "embedding_dropout",
    "residual_dropout",
    # The type that softmax computes in.
    "attention_softmax_in_fp32",
    "scale_attention_softmax_in_fp32",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Starcoder2Config(ModelConfig):
    """StarCoder2's configuration.

    Attributes:
        norm_epsilon: Epsilon of every layer norm.
        use_bias: Whether the linear layers have biases.
        sliding_window: Tokens that a token sees, itself included; None for all before it.
        rope: The rotary embedding.
    """

    norm_epsilon: float
    use_bias: bool
    sliding_window: int | None
    rope: RopeConfig

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        return self.rope.stretched(self.max_position_embeddings)


def config_from_hf(hf: Mapping[str, Any]) -> Starcoder2Config:
    """Read a `starcoder2` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf, aliases=ALIASES)
    common = read_common(reader, tie_word_embeddings=True, bos_token_id=50256, eos_token_ids=(50256,))
    config = Starcoder2Config(
        **common,
        norm_epsilon=reader.number("norm_epsilon"),
        use_bias=reader.flag("use_bias"),
        sliding_window=reader.optional_integer("sliding_window"),
        rope=read_rope(reader, common["head_dim"], default_theta=10000.0),
    )
    reader.require("mlp_type", "default", "a gated feed-forward part is not implemented for this family")
    reader.require("norm_type", "layer_norm", "another norm is not implemented for this family")
    reader.require("scale_attn_weights", True, "scores are always divided by sqrt(D)")
    reader.ignore(*WITHOUT_EFFECT)
    reader.refuse_unread(config.model_type)
    return config


def layer(config: Starcoder2Config, precision: Precision) -> SequentialLayer:
    """A layer."""
    compute, size, bias = precision.compute, config.hidden_size, config.use_bias
    return SequentialLayer(
        LayerNorm(size, config.norm_epsilon, compute),
        Attention(config, precision, qkv_bias=bias, out_bias=bias),
        LayerNorm(size, config.norm_epsilon, compute),
        MLP(size, config.intermediate_size, config.hidden_act, bias, precision),
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, Starcoder2Config)
    shared: list[Shared] = [
        CausalMask(config.sliding_window),
        Rotary(config.rope, config.head_dim, precision.compute),
    ]
    prelude = Prelude(token_embedding(config, precision), shared, precision.residual)
    layers = [layer(config, precision) for _ in range(config.num_hidden_layers)]
    return layer_norm_decoder(config, precision, prelude, layers, config.norm_epsilon)


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Llama's names, save for the feed-forward part."""
    same = [f"self_attn.{name}_proj" for name in "qkvo"] + ["input_layernorm", "post_attention_layernorm"]
    modules = {**{name: name for name in same}, "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
    return {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        **renamed({"model.norm": "model.norm"}),
        **renamed(modules, LAYER, LAYER),
    }


FAMILY = Family("starcoder2", config_from_hf, build, weight_names)
