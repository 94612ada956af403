"""What the conversion to GGUF makes of each family: other names, and some weights changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gguf import GGML_QUANT_VERSION

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.gguf_config import architecture_reader, gemma3, gpt2, llama, phi3, qwen2, qwen3
from kvgraph.models.gguf_file import GGUFFile, GGUFTensor
from kvgraph.models.gguf_rope import DIVISORS, LONG_DIVISORS, SHORT_DIVISORS
from kvgraph.models.gguf_weights import QUANTIZED_TYPES, GGUFWeight, HeadsInHalves, LessOne, Transposed
from kvgraph.models.weights import StoredWeight

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
_GPT2_LINEARS = {
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
# "blk.7.attn_q.weight"
_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>0|[1-9]\d*)\.(?P<module>\w+)\.(?P<kind>weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family as GGUF files have it.

    Attributes:
        model_type: The family.
        config: The keys of its config.json, from the metadata.
        inner: Modules of a layer: GGUF name -> Hugging Face name.
        outer: Likewise for the rest.
        layer: Hugging Face prefix of a layer.
        paired: Modules whose heads' rows have their pairs beside each other -> key that counts the heads.
        turned: Modules whose matrices are stored the other way round.
        plus_one: Modules whose weights are stored with one added.
        vectors: Tensors that the config is made of.
    """

    model_type: str
    config: Callable[[ConfigReader, GGUFFile], dict[str, Any]]
    inner: Mapping[str, str]
    outer: Mapping[str, str]
    layer: str = "model.layers.{i}."
    paired: Mapping[str, str] = field(default_factory=dict)
    turned: frozenset[str] = frozenset()
    plus_one: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        llama,
        {**_PRE_NORMS, **_ATTENTION, **_MLP},
        _OUTER,
        paired={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        vectors=frozenset({DIVISORS}),
    ),
    "qwen2": Architecture("qwen2", qwen2, {**_PRE_NORMS, **_ATTENTION, **_MLP}, _OUTER),
    "qwen3": Architecture("qwen3", qwen3, {**_PRE_NORMS, **_HEAD_NORMS, **_ATTENTION, **_MLP}, _OUTER),
    "gemma3": Architecture(
        "gemma3_text",
        gemma3,
        {**_SANDWICH_NORMS, **_HEAD_NORMS, **_ATTENTION, **_MLP},
        _OUTER,
        plus_one=frozenset({"output_norm", *_SANDWICH_NORMS, *_HEAD_NORMS}),
    ),
    "phi3": Architecture(
        "phi3",
        phi3,
        {**_PRE_NORMS, **_FUSED, **_FUSED_MLP},
        _OUTER,
        vectors=frozenset({LONG_DIVISORS, SHORT_DIVISORS}),
    ),
    "gpt2": Architecture(
        "gpt2",
        gpt2,
        {"attn_norm": "ln_1", "ffn_norm": "ln_2", **_GPT2_LINEARS},
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer="transformer.h.{i}.",
        turned=frozenset(_GPT2_LINEARS),
    ),
}


def architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    """Name and description of the architecture that a file says it is of.

    Raises:
        ValueError: It is not known, or the file holds something else than a model.
    """
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{file.path}: general.type is {kind!r}, expected 'model'")
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: general.architecture is {name!r}; known are {', '.join(ARCHITECTURES)}. Other models are "
            "read from Hugging Face directories"
        )
    return name, ARCHITECTURES[name]


def hugging_face_config(file: GGUFFile) -> dict[str, Any]:
    """The content of a config.json that describes the model.

    Raises:
        ValueError: The metadata is not complete, contradicts itself, or says what is not implemented.
    """
    name, architecture = architecture_of(file)
    reader = architecture_reader(file, name)
    _refuse_old_blocks(file)
    config = {"model_type": architecture.model_type, **architecture.config(reader, file)}
    if unread := reader.unread():
        listed = ", ".join(f"{key}={value!r}" for key, value in sorted(unread.items()))
        raise reader.error(
            f"{listed} may change what the model computes and is not implemented for {name!r}; remove what has no "
            "effect"
        )
    return config


def _refuse_old_blocks(file: GGUFFile) -> None:
    """Blocks of quantized types were laid out otherwise before version 2."""
    version = file.metadata.get("general.quantization_version", GGML_QUANT_VERSION)
    quantized = [tensor for tensor in file.tensors.values() if tensor.type in QUANTIZED_TYPES]
    if quantized and version != GGML_QUANT_VERSION:
        raise ValueError(
            f"{file.path}: general.quantization_version is {version!r}, expected {GGML_QUANT_VERSION}; convert the "
            "model again"
        )


def hugging_face_weights(file: GGUFFile, config: Mapping[str, Any]) -> dict[str, StoredWeight]:
    """The tensors under their Hugging Face names and with the values that they had before the conversion.

    Tensors that are not known keep their names, under which no model asks for them.

    Args:
        file: The file.
        config: From `hugging_face_config`.

    Raises:
        ValueError: Two tensors come under one name.
    """
    _, architecture = architecture_of(file)
    weights: dict[str, StoredWeight] = {}
    for tensor in file.tensors.values():
        if tensor.name in architecture.vectors:
            continue
        name = _renamed(architecture, tensor.name)
        if name in weights:
            raise ValueError(
                f"{file.path}: tensors {weights[name].spec.name!r} and {tensor.name!r} are both {name!r}"
            )
        weights[name] = _restored(architecture, tensor, config)
    return weights


def _renamed(architecture: Architecture, name: str) -> str:
    found = _LAYER_TENSOR.fullmatch(name)
    if found and found["module"] in architecture.inner:
        prefix = architecture.layer.replace("{i}", found["layer"])
        return f"{prefix}{architecture.inner[found['module']]}.{found['kind']}"
    module, _, kind = name.rpartition(".")
    if module in architecture.outer and kind in ("weight", "bias"):
        return f"{architecture.outer[module]}.{kind}"
    return name


def _restored(architecture: Architecture, tensor: GGUFTensor, config: Mapping[str, Any]) -> StoredWeight:
    """The weight as it was before the conversion."""
    weight, module = GGUFWeight(tensor), tensor.name.split(".")[-2:][0]
    if module in architecture.paired:
        return HeadsInHalves(weight, config[architecture.paired[module]])
    if module in architecture.turned and len(tensor.shape) == 2:
        return Transposed(weight)
    return LessOne(weight) if module in architecture.plus_one else weight
