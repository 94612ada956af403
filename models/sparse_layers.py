"""Decoders in the manner of Llama where only some layers have experts, as Qwen spells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.experts import Experts, ExpertsMLP, Router, read_top_k
from kvgraph.models.layers import GatedMLP, Precision
from kvgraph.models.rms_decoder import RMSConfig, gated_mlp, read_rms


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(RMSConfig):
    """The configuration of a decoder with experts in some layers; `intermediate_size` is for those without.

    Attributes:
        num_experts: Experts of a layer that has them.
        num_experts_per_tok: How many of them a token uses.
        moe_intermediate_size: Width of an expert.
        norm_topk_prob: Whether the weights of the chosen add up to one.
        decoder_sparse_step: Only every so manieth layer has experts.
        mlp_only_layers: Layers that have none all the same.
    """

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


def read_sparse(reader: ConfigReader) -> dict[str, Any]:
    """The fields of `SparseConfig` save for `rope`.

    Raises:
        ValueError: A key is missing or malformed.
    """
    common = read_rms(reader)
    num_experts = reader.integer("num_experts", "num_local_experts")
    return {
        **common,
        "num_experts": num_experts,
        "num_experts_per_tok": read_top_k(reader, num_experts),
        "moe_intermediate_size": reader.integer("moe_intermediate_size"),
        "norm_topk_prob": reader.flag("norm_topk_prob"),
        "decoder_sparse_step": reader.integer("decoder_sparse_step"),
        "mlp_only_layers": _read_mlp_only_layers(reader, common["num_hidden_layers"]),
    }


def _read_mlp_only_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """`mlp_only_layers`; none where the file leaves it out."""
    layers = reader.value("mlp_only_layers")
    if layers is None:
        return ()
    if not isinstance(layers, list) or any(
        isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < num_layers
        for layer in layers
    ):
        raise reader.error(f"mlp_only_layers is {layers!r}, expected a list of layers below {num_layers}")
    return tuple(layers)


def feed_forward(
    config: SparseConfig, precision: Precision, layer: int, shared_expert_size: int | None = None
) -> nn.Module:
    """The feed-forward part of a layer.

    Args:
        config: Sizes, and which layers have experts.
        precision: Element types.
        layer: Its number.
        shared_expert_size: Width of the expert that every token uses; None where there is none.
    """
    if not config.has_experts(layer):
        return gated_mlp(config, precision)
    size = config.hidden_size
    shared = (
        None
        if shared_expert_size is None
        else GatedMLP(size, shared_expert_size, config.hidden_act, False, precision)
    )
    return ExpertsMLP(
        Router(size, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob),
        Experts(config.num_experts, size, config.moe_intermediate_size, config.hidden_act, precision),
        shared,
    )
