"""Llama: pre-norm decoder, rotary attention with grouped key/value heads, gated SiLU feed-forward."""

from __future__ import annotations

from torch import Tensor, nn

from kvgraph.models.config import ModelConfig, read_llama_like
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family
from kvgraph.models.layers import Attention, GatedMLP, Precision, RMSNorm


class LlamaLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        super().__init__()
        compute = precision.compute
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, compute)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.attention_bias,
            config.head_dim**-0.5,
            compute,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, compute)
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias, compute
        )

    def forward(
        self,
        hidden_states: Tensor,
        past_length: Tensor,
        past_key: Tensor,
        past_value: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `kvgraph.models.decoder.DecoderLayer`."""
        attended, key, value = self.self_attn(
            self.input_layernorm(hidden_states), past_length, past_key, past_value, cos, sin, mask
        )
        hidden_states = hidden_states + attended.to(hidden_states.dtype)
        fed_forward = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + fed_forward.to(hidden_states.dtype), key, value


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    layers = [LlamaLayer(config, precision) for _ in range(config.num_hidden_layers)]
    return Decoder(config, precision, layers, ["full_attention"] * len(layers))


LAYER = "model.layers.{i}."
WEIGHT_NAMES: dict[str, str | None] = {
    "model.embed_tokens.weight": "model.embed_tokens.weight",
    LAYER + "input_layernorm.weight": LAYER + "input_layernorm.weight",
    LAYER + "self_attn.q_proj.weight": LAYER + "self_attn.q_proj.weight",
    LAYER + "self_attn.q_proj.bias": LAYER + "self_attn.q_proj.bias",
    LAYER + "self_attn.k_proj.weight": LAYER + "self_attn.k_proj.weight",
    LAYER + "self_attn.k_proj.bias": LAYER + "self_attn.k_proj.bias",
    LAYER + "self_attn.v_proj.weight": LAYER + "self_attn.v_proj.weight",
    LAYER + "self_attn.v_proj.bias": LAYER + "self_attn.v_proj.bias",
    LAYER + "self_attn.o_proj.weight": LAYER + "self_attn.o_proj.weight",
    LAYER + "self_attn.o_proj.bias": LAYER + "self_attn.o_proj.bias",
    # Old checkpoints carry the rotary table, which the config determines.
    LAYER + "self_attn.rotary_emb.inv_freq": None,
    LAYER + "post_attention_layernorm.weight": LAYER + "post_attention_layernorm.weight",
    LAYER + "mlp.gate_proj.weight": LAYER + "mlp.gate_proj.weight",
    LAYER + "mlp.gate_proj.bias": LAYER + "mlp.gate_proj.bias",
    LAYER + "mlp.up_proj.weight": LAYER + "mlp.up_proj.weight",
    LAYER + "mlp.up_proj.bias": LAYER + "mlp.up_proj.bias",
    LAYER + "mlp.down_proj.weight": LAYER + "mlp.down_proj.weight",
    LAYER + "mlp.down_proj.bias": LAYER + "mlp.down_proj.bias",
    "model.norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}

FAMILY = Family("llama", read_llama_like, build, WEIGHT_NAMES)
