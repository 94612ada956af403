"""GPT-NeoX and Pythia: partial rotary positions, attention and feed-forward side by side, layer norms, biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvgraph.models.config import ModelConfig, read_common
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder, Prelude
from kvgraph.models.family import Family, Into
from kvgraph.models.fused_qkv import grouped_ranges, qkv_parts
from kvgraph.models.layer_norm import LayerNorm
from kvgraph.models.layer_norm_decoder import LAYER, layer_norm_decoder, renamed, token_embedding
from kvgraph.models.layers import MLP, Attention, Precision
from kvgraph.models.positions import CausalMask, Rotary, Shared
from kvgraph.models.residual_layers import ParallelLayer, SequentialLayer
from kvgraph.models.rope import RopeConfig, read_partial_rope

ALIASES = {"rope_theta": ("rotary_emb_base",), "partial_rotary_factor": ("rotary_pct",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    """GPT-NeoX's configuration.

    Attributes:
        layer_norm_eps: Epsilon of every layer norm.
        attention_bias: Whether the projections around attention have biases; those of the feed-forward part do.
        use_parallel_residual: Whether attention and feed-forward part both read the layer's input.
        rope: The rotary embedding.
        rotary_dim: How many dimensions of a head it rotates, the first ones.
    """

    layer_norm_eps: float
    attention_bias: bool
    use_parallel_residual: bool
    rope: RopeConfig
    rotary_dim: int

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        return self.rope.stretched(self.max_position_embeddings)


def config_from_hf(hf: Mapping[str, Any]) -> GPTNeoXConfig:
    """Read a `gpt_neox` config.json; defaults as in `llama.config_from_hf`."""
    reader = ConfigReader(hf, aliases=ALIASES)
    common = read_common(reader, bos_token_id=0, eos_token_ids=(2,))
    rope, rotary_dim = read_partial_rope(reader, common["head_dim"])
    config = GPTNeoXConfig(
        **common,
        layer_norm_eps=reader.number("layer_norm_eps"),
        attention_bias=reader.flag("attention_bias", default=True),
        use_parallel_residual=reader.flag("use_parallel_residual", default=True),
        rope=rope,
        rotary_dim=rotary_dim,
    )
    # Dropout, as the first files spell it.
    reader.ignore("attention_probs_dropout_prob", "hidden_dropout_prob")
    reader.refuse_unread(config.model_type)
    return config


def layer(config: GPTNeoXConfig, precision: Precision) -> ParallelLayer | SequentialLayer:
    """A layer of either arrangement."""
    compute, size = precision.compute, config.hidden_size
    arrangement = ParallelLayer if config.use_parallel_residual else SequentialLayer
    return arrangement(
        LayerNorm(size, config.layer_norm_eps, compute),
        Attention(config, precision, qkv_bias=config.attention_bias, out_bias=config.attention_bias),
        LayerNorm(size, config.layer_norm_eps, compute),
        MLP(size, config.intermediate_size, config.hidden_act, True, precision),
    )


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, GPTNeoXConfig)
    shared: list[Shared] = [CausalMask(), Rotary(config.rope, config.rotary_dim, precision.compute)]
    prelude = Prelude(token_embedding(config, precision), shared, precision.residual)
    layers = [layer(config, precision) for _ in range(config.num_hidden_layers)]
    return layer_norm_decoder(config, precision, prelude, layers, config.layer_norm_eps)


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Query, key and value of one head lie behind another in a fused tensor; the head is called embed_out."""
    layer, ranges = "gpt_neox.layers.{i}.", grouped_ranges(config)
    modules = {
        "attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
        "input_layernorm": "input_layernorm",
        "post_attention_layernorm": "post_attention_layernorm",
    }
    return {
        "gpt_neox.embed_in.weight": "model.embed_tokens.weight",
        "embed_out.weight": "lm_head.weight",
        **renamed({"final_layer_norm": "norm"}, "gpt_neox.", "model."),
        **renamed(modules, layer, LAYER),
        **{
            f"{layer}attention.query_key_value.{kind}": qkv_parts(ranges, LAYER, kind)
            for kind in ("weight", "bias")
        },
        # Causal masks and rotary tables of old files.
        layer + "attention.bias": None,
        layer + "attention.masked_bias": None,
        layer + "attention.rotary_emb.inv_freq": None,
    }


FAMILY = Family("gpt_neox", config_from_hf, build, weight_names)
