"""Falcon: one or few key/value heads, attention and feed-forward side by side; ALiBi in its RW models.

| generation | fused tensor | norms |
|---|---|---|
| `new_decoder_architecture` (40B, 180B, 2-11B) | per key/value head: its queries, key, value | one per branch, or one |
| `multi_query` (7B) | queries, one key, one value | one |
| neither (RW) | per head: query, key, value | one per branch, one behind the other |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvgraph.models.alibi import AlibiMask
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
from kvgraph.models.rope import RopeConfig, read_rope

ALIASES = {
    "hidden_size": ("n_embed",),
    "intermediate_size": ("ffn_hidden_size",),
    "num_key_value_heads": ("num_kv_heads",),
    "hidden_act": ("activation",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconConfig(ModelConfig):
    """Falcon's configuration.

    Attributes:
        layer_norm_epsilon: Epsilon of every layer norm.
        bias: Whether the linear layers have biases.
        new_decoder_architecture: Whether this is the second generation.
        parallel_attn: Whether attention and feed-forward part both read the layer's input.
        num_ln_in_parallel_attn: Norms of a layer whose branches are parallel: one for both, or one for each.
        rope: The rotary embedding; None where ALiBi takes its place.
    """

    layer_norm_epsilon: float
    bias: bool
    new_decoder_architecture: bool
    parallel_attn: bool
    num_ln_in_parallel_attn: int
    rope: RopeConfig | None

    @property
    def max_positions(self) -> int:
        """See `ModelConfig.max_positions`."""
        longest = self.max_position_embeddings
        return longest if self.rope is None else self.rope.stretched(longest)


def config_from_hf(hf: Mapping[str, Any]) -> FalconConfig:
    """Read a `falcon` config.json; defaults as in `llama.config_from_hf`.

    Raises:
        ValueError: See `llama.config_from_hf`.
    """
    reader = ConfigReader(hf, aliases=ALIASES)
    size = reader.integer("hidden_size")
    common = read_common(
        reader,
        hidden_act="gelu",
        tie_word_embeddings=True,
        bos_token_id=11,
        eos_token_ids=(11,),
        intermediate_size=reader.integer("ff_factor", default=4) * size,
        max_position_embeddings=2048,
    )
    new, parallel, norms = read_arrangement(reader)
    multi_query = reader.flag("multi_query", default=True)
    if not new:
        common["num_key_value_heads"] = 1 if multi_query else common["num_attention_heads"]
    alibi = reader.flag("alibi", default=False)
    config = FalconConfig(
        **common,
        layer_norm_epsilon=reader.number("layer_norm_epsilon"),
        bias=reader.flag("bias"),
        new_decoder_architecture=new,
        parallel_attn=parallel,
        num_ln_in_parallel_attn=norms,
        rope=None if alibi else read_rope(reader, common["head_dim"], default_theta=10000.0),
    )
    if alibi:
        reader.ignore("rope_parameters", "rope_scaling", "rope_theta")
    # BLOOM's key, which this family never had a use for.
    reader.ignore("apply_residual_connection_post_layernorm")
    reader.accept_auto_map("FalconForCausalLM")
    reader.refuse_unread(config.model_type)
    return config


def read_arrangement(reader: ConfigReader) -> tuple[bool, bool, int]:
    """`new_decoder_architecture`, `parallel_attn` and `num_ln_in_parallel_attn`, which have to fit together."""
    new = reader.flag("new_decoder_architecture", default=False)
    parallel = reader.flag("parallel_attn", default=True)
    norms = reader.integer("num_ln_in_parallel_attn", default=2 if new else 1)
    if new and not parallel:
        raise reader.error("parallel_attn is false; branches of new_decoder_architecture are always parallel")
    if norms > 2 or (norms == 2 and not new):
        raise reader.error(f"num_ln_in_parallel_attn is {norms}, expected 1{' or 2' if new else ''}")
    return new, parallel, norms


class FalconAlibiMask(AlibiMask):
    """ALiBi as Falcon was trained with: the bias of a slot is rounded to bfloat16, and scaled as the scores are."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__(num_heads, dtype)
        self.head_dim = head_dim

    def bias(self, slopes: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """See `AlibiMask.bias`.

        Rounded, a bias is no function of the distance; but the one at the row's own position can be taken off.
        """
        slope = _as_bfloat16(slopes)
        of_slots = _as_bfloat16(slope * _as_bfloat16(slots.to(torch.float32)))
        of_positions = _as_bfloat16(slope * _as_bfloat16(positions.to(torch.float32)))
        return (of_slots - of_positions) / math.sqrt(self.head_dim)


def _as_bfloat16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def layer(
    config: FalconConfig, precision: Precision, shared: tuple[str, ...]
) -> ParallelLayer | SequentialLayer:
    """A layer of any generation."""
    compute, size, epsilon = precision.compute, config.hidden_size, config.layer_norm_epsilon
    first, second = LayerNorm(size, epsilon, compute), LayerNorm(size, epsilon, compute)
    attention = Attention(config, precision, qkv_bias=config.bias, out_bias=config.bias)
    mlp = MLP(size, config.intermediate_size, config.hidden_act, config.bias, precision)
    if not config.parallel_attn:
        return SequentialLayer(first, attention, second, mlp, shared=shared)
    both = config.num_ln_in_parallel_attn == 1
    return ParallelLayer(first, attention, None if both else second, mlp, shared=shared)


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, FalconConfig)
    compute = precision.compute
    shared: list[Shared] = (
        [FalconAlibiMask(config.num_attention_heads, config.head_dim, compute)]
        if config.rope is None
        else [CausalMask(), Rotary(config.rope, config.head_dim, compute)]
    )
    prelude = Prelude(token_embedding(config, precision), shared, precision.residual)
    layers = [layer(config, precision, prelude.shared_names) for _ in range(config.num_hidden_layers)]
    return layer_norm_decoder(config, precision, prelude, layers, config.layer_norm_epsilon)


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Names of the norms depend on the generation; the fused tensor is grouped by key/value head in all."""
    assert isinstance(config, FalconConfig)
    layer, ranges = "transformer.h.{i}.", grouped_ranges(config)
    separate = config.parallel_attn and config.num_ln_in_parallel_attn == 2
    first, second = ("ln_attn", "ln_mlp") if separate else ("input_layernorm", "post_attention_layernorm")
    modules = {
        "self_attention.dense": "self_attn.o_proj",
        "mlp.dense_h_to_4h": "mlp.up_proj",
        "mlp.dense_4h_to_h": "mlp.down_proj",
        first: "input_layernorm",
        second: "post_attention_layernorm",
    }
    return {
        "transformer.word_embeddings.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        **renamed({"ln_f": "norm"}, "transformer.", "model."),
        **renamed(modules, layer, LAYER),
        **{
            f"{layer}self_attention.query_key_value.{kind}": qkv_parts(ranges, LAYER, kind)
            for kind in ("weight", "bias")
        },
        # Rotary tables of old files.
        layer + "self_attention.rotary_emb.inv_freq": None,
    }


FAMILY = Family("falcon", config_from_hf, build, weight_names)
