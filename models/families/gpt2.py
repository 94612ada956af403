"""GPT-2: learned positions, layer norms, biases everywhere, a head that is the embedding table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into, Part
from kvgraph.models.fused_qkv import qkv_parts, stacked_ranges
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import LAYER, layer_norm_decoder, renamed, token_embedding
from kvgraph.models.layers import MLP, Attention, Embedding, Precision
from kvgraph.models.learned_positions import LearnedPositionsPrelude
from kvgraph.models.positions import CausalMask
from kvgraph.models.residual_layers import SequentialLayer

ALIASES = {
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner",),
    "num_hidden_layers": ("n_layer",),
    "num_attention_heads": ("n_head",),
    # n_ctx was the size of a causal mask, which went with the table of positions.
    "max_position_embeddings": ("n_positions", "n_ctx"),
    "hidden_act": ("activation_function",),
}
WITHOUT_EFFECT = (
    # The same product and softmax in another order and type.
    "reorder_and_upcast_attn",
    # What a classification head is made of.
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(ModelConfig):
    """GPT-2's configuration; `max_position_embeddings` is the size of the table of positions.

    Attributes:
        layer_norm_epsilon: Epsilon of every layer norm.
        scale_attn_weights: Whether scores are divided by sqrt(D).
        scale_attn_by_inverse_layer_idx: Whether those of layer i are divided by i + 1 as well.
    """

    layer_norm_epsilon: float
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool

    def attention_scale(self, layer: int) -> float:
        """Factor on the scores of a layer."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


def config_from_hf(hf: Mapping[str, Any]) -> GPT2Config:
    """Read a `gpt2` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf, aliases=ALIASES)
    common = read_common(
        reader,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
        bos_token_id=50256,
        eos_token_ids=(50256,),
        intermediate_size=4 * reader.integer("hidden_size"),
    )
    config = GPT2Config(
        **common,
        layer_norm_epsilon=reader.number("layer_norm_epsilon"),
        scale_attn_weights=reader.flag("scale_attn_weights", default=True),
        scale_attn_by_inverse_layer_idx=reader.flag("scale_attn_by_inverse_layer_idx", default=False),
    )
    reader.ignore(*WITHOUT_EFFECT)
    reader.refuse_unread(config.model_type)
    return config


def layer(config: GPT2Config, index: int, precision: Precision) -> SequentialLayer:
    """Layer `index`, which is a kind of its own where its scores have a scale of their own."""
    compute, size, epsilon = precision.compute, config.hidden_size, config.layer_norm_epsilon
    scale = config.attention_scale(index)
    return SequentialLayer(
        LayerNorm(size, epsilon, compute),
        Attention(config, precision, qkv_bias=True, out_bias=True, scale=scale),
        LayerNorm(size, epsilon, compute),
        MLP(size, config.intermediate_size, config.hidden_act, True, precision),
        shared=("mask",),
        kind=f"attention_scale_{scale}",
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, GPT2Config)
    embed_positions = Embedding(config.max_position_embeddings, config.hidden_size, precision.compute)
    prelude = LearnedPositionsPrelude(
        token_embedding(config, precision), embed_positions, [CausalMask()], precision.residual
    )
    layers = [layer(config, index, precision) for index in range(config.num_hidden_layers)]
    return layer_norm_decoder(config, precision, prelude, layers, config.layer_norm_epsilon)


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """GPT-2's `Conv1D` stores matrices [in, out], as the graphs do."""
    layer, ranges = "transformer.h.{i}.", stacked_ranges(config)
    linears = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
    return {
        "transformer.wte.weight": "model.embed_tokens.weight",
        "transformer.wpe.weight": "model.embed_positions.weight",
        "lm_head.weight": "lm_head.weight",
        **renamed({"ln_f": "norm"}, "transformer.", "model."),
        **renamed({"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}, layer, LAYER),
        layer + "attn.c_attn.weight": qkv_parts(ranges, LAYER, "weight", axis=1, transpose=False),
        layer + "attn.c_attn.bias": qkv_parts(ranges, LAYER, "bias"),
        **{
            f"{layer}{source}.weight": Part(f"{LAYER}{module}.weight", transpose=False)
            for source, module in linears.items()
        },
        **{f"{layer}{source}.bias": f"{LAYER}{module}.bias" for source, module in linears.items()},
        # Causal masks of old files.
        layer + "attn.bias": None,
        layer + "attn.masked_bias": None,
    }


FAMILY = Family("gpt2", config_from_hf, build, weight_names, base_prefix="transformer.")
