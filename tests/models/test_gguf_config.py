"""What the metadata of a GGUF file says of a model: honoured, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kvgraph.models.config import ModelConfig
from kvgraph.models.gguf_architectures import ARCHITECTURES, hugging_face_config, hugging_face_weights
from kvgraph.models.gguf_file import GGUFFile, GGUFTensor, read_gguf
from kvgraph.models.gguf_rope import rotary_fraction

SIZES: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": 24,
    "block_count": 3,
    "feed_forward_length": 40,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"attention.key_length": 8, "attention.value_length": 8},
    "gemma3": {"attention.key_length": 8, "attention.value_length": 8, "attention.sliding_window": 5},
    "phi3": {"attention.sliding_window": 0, "rope.scaling.original_context_length": 16},
    "gpt2": {
        "attention.layer_norm_epsilon": 1e-5,
        "attention.head_count_kv": 4,
        "attention.layer_norm_rms_epsilon": ...,
        "rope.freq_base": ...,
    },
}


def tensor(name: str, *shape: int, kind: Kind = Kind.F32) -> GGUFTensor:
    return GGUFTensor(name, kind, shape, 0, Path("m.gguf"))


def file(architecture: str = "llama", tensors: tuple[GGUFTensor, ...] = (), **changes: Any) -> GGUFFile:
    """A header in memory; `changes` are of the architecture's keys, with "__" for ".", and ... leaves one out."""
    changed = {key.replace("__", "."): value for key, value in changes.items()}
    values = {**SIZES, **OWN[architecture], **changed}
    metadata = {f"{architecture}.{key}": value for key, value in values.items() if value is not ...}
    embedding = tensor("token_embd.weight", 97, 24)
    metadata = {"general.architecture": architecture, **metadata}
    return GGUFFile(Path("m.gguf"), metadata, {item.name: item for item in (embedding, *tensors)})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_gives_a_config_that_its_family_reads(architecture: str) -> None:
    config = ModelConfig.from_hf(hugging_face_config(file(architecture)))
    assert config.model_type == ARCHITECTURES[architecture].model_type
    assert (config.vocab_size, config.num_hidden_layers, config.tie_word_embeddings) == (97, 3, True)
    assert config.head_dim == (8 if "attention.key_length" in OWN[architecture] else 6)


def test_a_head_of_its_own_is_not_tied() -> None:
    assert not hugging_face_config(file("llama", (tensor("output.weight", 97, 24),)))["tie_word_embeddings"]


def test_biases_are_those_that_are_there() -> None:
    names = ("blk.0.attn_q.bias", "blk.0.ffn_up.bias")
    found = [
        hugging_face_config(file("llama", tuple(tensor(name, 24) for name in names[:n]))) for n in range(3)
    ]
    assert [(config["attention_bias"], config["mlp_bias"]) for config in found] == [
        (False, False),
        (True, False),
        (True, True),
    ]


@pytest.mark.parametrize(
    ("kinds", "dtype"),
    [
        ((Kind.F32,), "float32"),
        ((Kind.F16,), "float16"),
        ((Kind.BF16,), "bfloat16"),
        ((Kind.BF16, Kind.F16), "float32"),
        ((Kind.F16, Kind.Q4_0), "float32"),
    ],
)
def test_the_dtype_loses_nothing(kinds: tuple[Kind, ...], dtype: str) -> None:
    matrices = [tensor(f"blk.{i}.attn_v.weight", 32, 32, kind=kind) for i, kind in enumerate(kinds)]
    embedding = tensor("token_embd.weight", 97, 24, kind=kinds[0])
    assert hugging_face_config(file("llama", (embedding, tensor("norm", 24), *matrices)))["dtype"] == dtype


def test_sizes_that_are_listed_by_layer_may_not_differ() -> None:
    listed = file(feed_forward_length=[40, 40, 40], attention__head_count=[4, 4, 4])
    assert hugging_face_config(listed) == hugging_face_config(file())
    for values in ([40, 40, 41], [40, 40]):
        with pytest.raises(ValueError, match=r"llama.feed_forward_length is \[40, 40.*layers that differ"):
            hugging_face_config(file(feed_forward_length=values))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "logit_scale=0.5 may change what the model computes": ("llama", {"logit_scale": 0.5}),
    "attention.scale=0.1 may change": ("qwen2", {"attention__scale": 0.1}),
    "attention.sliding_window=512 may change": ("llama", {"attention__sliding_window": 512}),
    "expert_count is 8, expected 0": ("llama", {"expert_count": 8}),
    "attention.causal is False": ("llama", {"attention__causal": False}),
    "attention.value_length is 12, expected 6": ("llama", {"attention__value_length": 12}),
    "vocab_size is 98, expected 97": ("llama", {"vocab_size": 98}),
    "context_length is missing": ("qwen3", {"context_length": ...}),
    "rope.freq_base is missing": ("qwen2", {"rope__freq_base": ...}),
    "attention.layer_norm_rms_epsilon is missing": ("gemma3", {"attention__layer_norm_rms_epsilon": ...}),
    "attention.sliding_window is missing: early converters": ("phi3", {"attention__sliding_window": ...}),
    "attention.sliding_window_pattern has 2 values, expected 3": (
        "gemma3",
        {"attention__sliding_window_pattern": [True, False]},
    ),
    "are not those of a GPT-2": ("gpt2", {"attention__head_count_kv": 2}),
    "rope.dimension_count is 4, expected 6": ("llama", {"rope__dimension_count": 4}),
    "rope.scaling.type 'longrope' is not implemented": ("llama", {"rope__scaling__type": "longrope"}),
    "rope.scaling.attn_factor is 1.5, expected 1.0": ("qwen3", {"rope__scaling__attn_factor": 1.5}),
    "yarn_ext_factor is 0.5, expected 1.0": (
        "qwen3",
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__yarn_ext_factor": 0.5},
    ),
    "yarn_log_multiplier=0.1 may change": (
        "qwen3",
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 2.0,
            "rope__scaling__yarn_log_multiplier": 0.1,
        },
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_implemented_is_named(message: str) -> None:
    architecture, changes = REFUSED[message]
    with pytest.raises(ValueError, match=rf"m.gguf: metadata {architecture}.*{message}"):
        hugging_face_config(file(architecture, **changes))


def test_other_metadata_is_of_no_consequence() -> None:
    plain = file()
    extra = {
        "general.name": "x",
        "quantize.imatrix.file": "y",
        "general.sampling.temp": 0.5,
        "somebody.s.own": 1,
    }
    assert hugging_face_config(GGUFFile(plain.path, {**plain.metadata, **extra}, plain.tensors)) == (
        hugging_face_config(plain)
    )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba'; known are llama, qwen2"),
        ({}, "general.architecture is None"),
        ({"general.architecture": "llama", "general.type": "adapter"}, "general.type is 'adapter'"),
    ],
)
def test_what_is_no_known_model_is_named(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"m.gguf: {message}"):
        hugging_face_config(GGUFFile(Path("m.gguf"), metadata, {}))


def test_blocks_of_an_old_layout_are_refused() -> None:
    old = file("llama", (tensor("blk.0.ffn_up.weight", 40, 32, kind=Kind.Q4_0),))
    metadata = {**old.metadata, "general.quantization_version": 1}
    with pytest.raises(ValueError, match=r"general.quantization_version is 1, expected 2"):
        hugging_face_config(GGUFFile(old.path, metadata, old.tensors))


def test_a_vocabulary_alone_is_no_model() -> None:
    alone = GGUFFile(Path("m.gguf"), file().metadata, {})
    with pytest.raises(
        ValueError, match=r"tensor 'token_embd.weight' is missing; the file holds no whole model"
    ):
        hugging_face_config(alone)


def rope(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    found = hugging_face_config(file(architecture, **changes))["rope_parameters"]
    assert isinstance(found, dict)
    return found


def test_rope_scaling_is_taken_over() -> None:
    default = {"rope_type": "default", "rope_theta": 10000.0}
    assert rope() == rope(rope__freq_base=...) == rope(rope__scaling__factor=1.0) == default
    assert rope(rope__scaling__type="none", rope__scaling__factor=4.0) == default
    linear = {**default, "rope_type": "linear", "factor": 4.0}
    # Without a type a factor is linear, and early files had another name for it.
    assert rope(rope__scaling__factor=4.0) == rope(rope__scale_linear=4.0) == linear
    yarn = {**default, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert rope(rope__scaling__type="yarn", rope__scaling__factor=4.0) == yarn
    given = {
        "original_context_length": 32,
        "yarn_attn_factor": 1.2,
        "yarn_beta_fast": 16.0,
        "yarn_beta_slow": 2.0,
    }
    changes = {f"rope__scaling__{key}": value for key, value in given.items()}
    assert rope(rope__scaling__type="yarn", rope__scaling__factor=4.0, **changes) == {
        **yarn,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.2,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    }


def test_only_full_layers_of_gemma3_are_scaled() -> None:
    found = rope("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base_swa=500.0)
    assert found == {
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    }


@pytest.mark.parametrize(
    ("changes", "types"),
    [
        ({}, "sss"),
        ({"block_count": 7}, "sssssfs"),
        ({"attention__sliding_window_pattern": 2}, "sfs"),
        ({"attention__sliding_window_pattern": [False, True, False]}, "fsf"),
        ({"attention__sliding_window": 0}, "fff"),
    ],
)
def test_the_windows_of_gemma3_follow_their_pattern(changes: dict[str, Any], types: str) -> None:
    found = hugging_face_config(file("gemma3", **changes))["layer_types"]
    assert "".join(layer_type[0] for layer_type in found) == types


def test_the_largest_gemma3_divides_its_scores_otherwise() -> None:
    scalars = [
        hugging_face_config(file("gemma3", block_count=layers))["query_pre_attn_scalar"]
        for layers in (48, 62)
    ]
    assert scalars == [8, 24 // 4]


def test_a_fraction_of_a_head_is_exact() -> None:
    for head_dim in range(2, 300, 2):
        for rotated in range(2, head_dim + 1, 2):
            assert int(head_dim * rotary_fraction(rotated, head_dim)) == rotated


def with_divisors(tmp_path: Path, values: list[float]) -> GGUFFile:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("rope_freqs.weight", np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file("llama", tuple(read_gguf(tmp_path / "m.gguf").tensors.values()))


def test_divided_frequencies_are_recognized_or_kept(tmp_path: Path) -> None:
    assert hugging_face_config(with_divisors(tmp_path, [1.0, 1.0, 1.0]))["rope_parameters"] == rope()
    found = hugging_face_config(with_divisors(tmp_path, [1.0, 2.0, 5.0]))["rope_parameters"]
    assert (found["rope_type"], found["short_factor"]) == ("longrope", [1.0, 2.0, 5.0])
    assert (found["long_factor"], found["attention_factor"]) == ([1.0, 2.0, 5.0], 1.0)


def test_divided_frequencies_are_not_scaled_again(tmp_path: Path) -> None:
    divided = with_divisors(tmp_path, [1.0, 2.0, 5.0])
    scaled = GGUFFile(divided.path, {**divided.metadata, "llama.rope.scaling.factor": 4.0}, divided.tensors)
    with pytest.raises(ValueError, match=r"both rope.scaling.type 'linear' and tensor 'rope_freqs.weight'"):
        hugging_face_config(scaled)


def test_two_tensors_under_one_name_are_refused() -> None:
    both = file("llama", (tensor("output_norm.weight", 24), tensor("model.norm.weight", 24)))
    with pytest.raises(ValueError, match=r"'output_norm.weight' and 'model.norm.weight' are both"):
        hugging_face_weights(both, hugging_face_config(both))


def test_an_unknown_tensor_keeps_its_name() -> None:
    names = (
        "blk.0.attn_qkv.weight",
        "blk.00.attn_q.weight",
        "blk.0.attn_q.scale",
        "rope_factors_long.weight",
    )
    odd = file("llama", tuple(tensor(name, 24, 24) for name in names))
    assert set(hugging_face_weights(odd, hugging_face_config(odd))) == {"model.embed_tokens.weight", *names}
