"""Gemma: norm weights that multiply as 1 + w, embeddings scaled by sqrt(E), tanh GELU, a large head dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvgraph.models.config import ModelConfig
from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.decoder import Decoder
from kvgraph.models.family import Family, Into, Part
from kvgraph.models.layers import Attention, Precision, RMSNorm
from kvgraph.models.positions import CausalMask, Rotary
from kvgraph.models.residual_layers import SequentialLayer
from kvgraph.models.rms_decoder import (
    GATED_MLP,
    LAYER,
    PRE_NORMS,
    QKVO,
    RMSConfig,
    gated_mlp,
    read_rms,
    rms_decoder,
    same_names,
)
from kvgraph.models.rope import read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig(RMSConfig):
    """Gemma's configuration.

    Attributes:
        attention_bias: Whether the q, k, v and o projections have biases.
    """

    attention_bias: bool


def config_from_hf(hf: Mapping[str, Any]) -> GemmaConfig:
    """Read a `gemma` config.json.

    Raises:
        ValueError: A key is missing, malformed, contradicted by another, or names what is not implemented.
    """
    reader = ConfigReader(hf)
    # Not derived from the hidden size: transformers takes 256 where it is absent.
    head_dim = reader.integer("head_dim")
    # Published files leave out that the head is tied.
    common = read_rms(reader, tie_word_embeddings=True)
    config = GemmaConfig(
        **{**common, "hidden_act": _read_activation(reader)},
        attention_bias=reader.flag("attention_bias", default=False),
        rope=read_rope(reader, head_dim),
    )
    reader.refuse_unread(config.model_type)
    return config


def _read_activation(reader: ConfigReader) -> str:
    """The first release says "gelu" and means its tanh form; a later key says so and must agree."""
    tanh = "gelu_pytorch_tanh"
    name = reader.text("hidden_act")
    name = tanh if name == "gelu" else name
    reader.require("hidden_activation", name, "it names the same activation as hidden_act")
    return name


def embedding_scale(hidden_size: int, dtype: torch.dtype) -> float:
    """sqrt(E) as the compute type holds it: models were trained with 55.5 for E = 3072, its root in bfloat16."""
    exact = math.sqrt(hidden_size)
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(exact))
    return round(exact / step) * step


def shifted_norms(modules: Iterable[str]) -> dict[str, Into]:
    """Names of norms that multiply by one plus their stored weight: those of a layer, and the last."""
    names = ("model.norm.weight", *(f"{LAYER}{module}.weight" for module in modules))
    return {name: Part(name, add=1.0) for name in names}


def build(config: ModelConfig, precision: Precision) -> Decoder:
    """The module with unset parameters."""
    assert isinstance(config, GemmaConfig)
    compute, bias = precision.compute, config.attention_bias

    def layer() -> SequentialLayer:
        return SequentialLayer(
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            Attention(config, precision, qkv_bias=bias, out_bias=bias),
            RMSNorm(config.hidden_size, config.rms_norm_eps, compute),
            gated_mlp(config, precision),
        )

    return rms_decoder(
        config,
        precision,
        [CausalMask(), Rotary(config.rope, config.head_dim, compute)],
        [layer() for _ in range(config.num_hidden_layers)],
        embedding_scale=embedding_scale(config.hidden_size, compute),
    )


def weight_names(config: ModelConfig) -> dict[str, Into]:
    """Checkpoint names are the graphs' own; norms get their one added."""
    return {**same_names([*QKVO, *GATED_MLP]), **shifted_norms(PRE_NORMS)}


FAMILY = Family("gemma", config_from_hf, build, weight_names)
