"""What an architecture file in `kvgraph.models.families` offers."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraph.models.config import ModelConfig

if TYPE_CHECKING:
    from kvgraph.models.encoder_decoder import Model
    from kvgraph.models.layers import Precision

# model_type -> module, so that a family is imported when it is asked for.
FAMILIES = {
    "bart": "kvgraph.models.families.bart",
    "bloom": "kvgraph.models.families.bloom",
    "cohere": "kvgraph.models.families.cohere",
    "falcon": "kvgraph.models.families.falcon",
    "gemma": "kvgraph.models.families.gemma",
    "gemma2": "kvgraph.models.families.gemma2",
    "gemma3": "kvgraph.models.families.gemma3",
    "gemma3_text": "kvgraph.models.families.gemma3_text",
    "gpt2": "kvgraph.models.families.gpt2",
    "gpt_neox": "kvgraph.models.families.gpt_neox",
    "granite": "kvgraph.models.families.granite",
    "llama": "kvgraph.models.families.llama",
    "m2m_100": "kvgraph.models.families.m2m_100",
    "marian": "kvgraph.models.families.marian",
    "mbart": "kvgraph.models.families.mbart",
    "mistral": "kvgraph.models.families.mistral",
    "mixtral": "kvgraph.models.families.mixtral",
    "mpt": "kvgraph.models.families.mpt",
    "olmo2": "kvgraph.models.families.olmo2",
    "pegasus": "kvgraph.models.families.pegasus",
    "phi": "kvgraph.models.families.phi",
    "phi3": "kvgraph.models.families.phi3",
    "post_norm_decoder": "kvgraph.models.families.post_norm_decoder",
    "post_norm_encoder_decoder": "kvgraph.models.families.post_norm_encoder_decoder",
    "pre_norm_decoder": "kvgraph.models.families.pre_norm_decoder",
    "qwen2": "kvgraph.models.families.qwen2",
    "qwen2_moe": "kvgraph.models.families.qwen2_moe",
    "qwen3": "kvgraph.models.families.qwen3",
    "qwen3_moe": "kvgraph.models.families.qwen3_moe",
    "smollm3": "kvgraph.models.families.smollm3",
    "starcoder2": "kvgraph.models.families.starcoder2",
    "t5": "kvgraph.models.families.t5",
}


@dataclass(frozen=True, slots=True)
class Part:
    """A parameter made from part of a checkpoint tensor, or from its values changed.

    Attributes:
        parameter: Name in the graphs.
        ranges: Which of the tensor's entries along `axis` to take, as (start, stop), in this order; () takes all.
        axis: 0 or 1, in the checkpoint's own orientation.
        transpose: Whether the checkpoint stores it the other way round; None: where the parameter is a `Linear`'s.
        add: Added to every value, in float32.
    """

    parameter: str
    ranges: tuple[tuple[int, int], ...] = ()
    axis: int = 0
    transpose: bool | None = None
    add: float = 0.0


# What becomes of a checkpoint tensor: a parameter as it is, parts of it, or None = known and dropped. "{i}" stands for
# the layer, "{j}" for the encoder's; "{e}" for the expert, whose tensors are stacked along a new first axis. Where
# several names become one whole parameter they are copies of each other, of which a checkpoint may hold any.
Into = str | Part | tuple[Part, ...] | None


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture.

    Attributes:
        model_type: Its name in config.json.
        config_from_hf: Reads config.json; refuses what it does not honour.
        build: The module with unset parameters, on the current default device.
        weight_names: Checkpoint tensor name -> what becomes of it.
        base_prefix: What the names of all but the head begin with, which checkpoints of the model without its head
            leave out.
        left_out: What the names of tensors begin with that belong to parts which the graphs do not have.
    """

    model_type: str
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    build: Callable[[ModelConfig, Precision], Model]
    weight_names: Callable[[ModelConfig], Mapping[str, Into]]
    base_prefix: str = ""
    left_out: tuple[str, ...] = ()


def family(model_type: str) -> Family:
    """The architecture that config.json names.

    Raises:
        ValueError: It is not known; the message lists the nearest known ones.
    """
    if model_type not in FAMILIES:
        near = difflib.get_close_matches(model_type, FAMILIES, n=3, cutoff=0.3) or sorted(FAMILIES)
        raise ValueError(
            f"model_type {model_type!r} is not known to kvgraph; the nearest are {', '.join(near)}"
        )
    found = importlib.import_module(FAMILIES[model_type]).FAMILY
    assert isinstance(found, Family)
    return found
