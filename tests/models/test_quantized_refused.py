"""Quantized checkpoints that are damaged, contradict themselves or ask for what is not implemented: refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.quantized import awq, compressed_tensors, fp8, gptq, modelopt
from kvgraph.models.quantized.coded import QuantizedCheckpoint
from kvgraph.models.safetensors_file import read_tensors

MODULE = "model.layers.0.mlp.up_proj"
INT8 = ("int-quantized", {"num_bits": 8, "strategy": "channel"})
INT4 = ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32})
Tensors = dict[str, torch.Tensor]
Settings = dict[str, Any]


@pytest.fixture
def read(tmp_path: Path, packers: ModuleType) -> Callable[..., QuantizedCheckpoint]:
    """Reads one module of 48 outputs and 96 inputs in a format, its tensors and settings changed."""
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(5))
    formats = {
        "int8": (compressed_tensors, packers.compressed(*INT8), packers.compressed_settings(*INT8)),
        "int4": (compressed_tensors, packers.compressed(*INT4), packers.compressed_settings(*INT4)),
        "gptq": (gptq, packers.gptq(), packers.gptq_settings()),
        "gptq in an order": (gptq, packers.gptq(seed=1), packers.gptq_settings(ordered=True)),
        "awq": (awq, packers.awq(), packers.awq_settings()),
        "fp8": (fp8, packers.float8((32, 32)), packers.float8_settings((32, 32))),
        "modelopt": (
            modelopt,
            packers.float8(None, "weight_scale", 0.5),
            {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        ),
    }

    def run(
        form: str,
        change: Callable[[Tensors], object] = lambda tensors: None,
        module: str = MODULE,
        **settings: Any,
    ) -> QuantizedCheckpoint:
        reader, pack, said = formats[form]
        tensors = pack(weight).tensors
        change(tensors)
        file = tmp_path / "model.safetensors"
        packers.write_tensors(file, {f"{module}.{name}": tensor for name, tensor in tensors.items()})
        found = reader.read_checkpoint({**said, **settings}, read_tensors(file))
        for coded in found.coded.values():
            coded.read(0, 48)
        assert isinstance(found, QuantizedCheckpoint)
        return found

    return run


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, value: float, index: tuple[int, ...] = (2, 0)) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].__setitem__(index, value)


def cut(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.__setitem__(name, tensors[name][:-1].contiguous())


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("int8", drop("weight_scale"), "has no weight_scale, but .* says that it is quantized"),
        ("int8", put("weight_scale", 0.0), r"weight_scale holds 0.0 at \[2, 0\], expected positive"),
        ("int8", put("weight_scale", float("nan")), "weight_scale holds nan"),
        ("int8", put("weight_scale", -1.0), "weight_scale holds -1.0"),
        ("int8", cut("weight_scale"), r"weight_scale has shape \[47, 1\], expected \[48, 1\] or \[48\]"),
        ("int4", drop("weight_shape"), "weight_shape is missing; there are weight_packed, weight_scale"),
        ("int4", cut("weight_packed"), r"weight_packed has shape \[47, 12\], expected \[48, 12\]"),
        ("gptq", drop("qzeros"), "qzeros is missing"),
        ("gptq", cut("scales"), r"scales has shape \[2, 48\], expected \[3, 48\]"),
        ("gptq", put("scales", float("inf")), "scales holds inf"),
        ("gptq", put("g_idx", 3, (5,)), "g_idx holds groups from 0 to 3, expected 0 to 2"),
        ("gptq", put("g_idx", -2, (5,)), "g_idx holds groups from -2 to 2"),
        ("gptq", put("g_idx", 2, (5,)), "puts 31 inputs into group 0, expected 32"),
        ("gptq", put("qzeros", 0, (1, 1)), "qzeros holds 1, but the settings say symmetric, which is 8"),
        ("gptq in an order", drop("g_idx"), "g_idx is missing, which desc_act needs"),
        ("awq", drop("scales"), "scales is missing"),
        ("awq", put("scales", -0.5), "scales holds -0.5"),
        ("fp8", drop("weight_scale_inv"), "weight_scale_inv is missing, without which"),
        ("fp8", put("weight_scale_inv", 0.0, (1, 1)), "weight_scale_inv holds 0.0"),
        ("fp8", cut("weight_scale_inv"), r"weight_scale_inv has shape \[1, 3\], expected \[2, 3\]"),
        ("fp8", put("weight", float("nan"), (7, 7)), "weight holds a NaN"),
        ("modelopt", drop("input_scale"), "input_scale is missing"),
        ("modelopt", drop("weight_scale"), "weight_scale is missing, without which"),
        ("modelopt", put("input_scale", float("nan"), ()), "input_scale holds nan"),
    ],
)
def test_damaged_tensors(
    form: str, change: Callable[[Tensors], object], message: str, read: Callable[..., QuantizedCheckpoint]
) -> None:
    with pytest.raises(ValueError, match=message):
        read(form, change)


def group(**changes: Any) -> Settings:
    """config_groups with some changes; of weights where they begin with "weights_"."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    weights |= {
        key.removeprefix("weights_"): value for key, value in changes.items() if key[:8] == "weights_"
    }
    others = {key: value for key, value in changes.items() if key[:8] != "weights_"}
    return {"group_0": {"targets": ["Linear"], "weights": weights, **others}}


@pytest.mark.parametrize(
    ("form", "settings", "message"),
    [
        ("int8", {"config_groups": group(weights_num_bits=3)}, "num_bits is 3 of type 'int'"),
        ("int8", {"config_groups": group(weights_actorder="best")}, "actorder is 'best'"),
        ("int8", {"config_groups": group(weights_rotation=1)}, "rotation=1 may change"),
        ("int8", {"config_groups": group(format="nvfp4-pack-quantized")}, "format is 'nvfp4-pack-quantized'"),
        ("int8", {"config_groups": group(output_activations={"num_bits": 8})}, "output_activations is"),
        (
            "int8",
            {"config_groups": group(input_activations={"num_bits": 8, "symmetric": False})},
            "symmetric is false, but inputs and caches with zero points are not implemented",
        ),
        (
            "int8",
            {
                "config_groups": group(
                    input_activations={"num_bits": 8, "strategy": "tensor", "dynamic": True}
                )
            },
            "strategy 'tensor' with dynamic True is not implemented",
        ),
        ("int8", {"config_groups": group(input_activations={"num_bits": 4})}, "num_bits is 4"),
        ("int8", {"config_groups": group(targets=["re:.*down_proj"])}, "has no group for it"),
        ("int8", {"ignore": ["re:.*up_proj"]}, "lists it in ignore"),
        ("int8", {"quantization_status": "frozen"}, "quantization_status is 'frozen'"),
        ("int8", {"transform_config": {"r1": {}}}, "transform_config is"),
        ("int8", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is"),
        ("int8", {"kv_cache_scheme": {"num_bits": 8, "dynamic": True}}, "kv_cache_scheme: strategy 'tensor'"),
        ("int8", {"kv_cache_scheme": {"num_bits": 8}}, "quantized cache, but there is no k_scale"),
        (
            "int8",
            {"config_groups": group(weights_strategy="group", weights_group_size=36)},
            "36 does not div",
        ),
        (
            "int4",
            {"config_groups": group(weights_num_bits=4, format="int-quantized")},
            "its codes are packed",
        ),
        ("gptq", {"bits": 3}, "bits is 3, expected 4 or 8"),
        ("gptq", {"group_size": 36}, "are not whole words of 8 outputs and groups of 36"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ("gptq", {"rotation": "hadamard"}, "rotation='hadamard' may change"),
        ("gptq", {"dynamic": {"-:.*up_proj": {}}}, "says in dynamic that it is not quantized"),
        ("gptq in an order", {"desc_act": False}, "puts its inputs into an order, but .* desc_act false"),
        ("awq", {"version": "gemv"}, "version is 'gemv', expected 'gemm'"),
        ("awq", {"zero_point": False}, "zero_point is false"),
        ("awq", {"bits": 8}, "bits is 8, expected 4"),
        ("awq", {"group_size": 40}, "group_size 40 does not divide its 96 inputs"),
        ("awq", {"modules_to_not_convert": ["up_proj"]}, "keeps 'up_proj' by modules_to_not_convert"),
        ("fp8", {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        ("fp8", {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme is 'static', which goes with one scale"),
        ("fp8", {"modules_to_not_convert": ["model.layers.0"]}, "keeps 'model.layers.0' float"),
        ("fp8", {"kv_cache_scheme": "static"}, "kv_cache_scheme='static' may change"),
        ("modelopt", {"quantization": {"quant_algo": "NVFP4"}}, "quant_algo is 'NVFP4', expected 'FP8'"),
        (
            "modelopt",
            {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
            "quantized cache, but there is no k_scale",
        ),
        ("modelopt", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["*up*"]}}, "excludes '\\*up"),
    ],
)
def test_settings_that_are_not_honoured(
    form: str, settings: Settings, message: str, read: Callable[..., QuantizedCheckpoint]
) -> None:
    with pytest.raises(ValueError, match=message):
        read(form, **settings)


def test_unchanged_is_read(read: Callable[..., QuantizedCheckpoint]) -> None:
    for form in ("int8", "int4", "gptq", "gptq in an order", "awq", "fp8", "modelopt"):
        assert [*read(form).coded] == [f"{MODULE}.weight"]


def test_zero_point_that_the_first_gptq_format_cannot_hold(
    read: Callable[..., QuantizedCheckpoint],
) -> None:
    # Stored less one, 16 is 15; codes of four bits end at 15.
    with pytest.raises(ValueError, match="qzeros stands for 16, expected at most 15"):
        read("gptq", put("qzeros", -1, (1, 1)), sym=False)


def test_tensors_that_belong_to_nothing_are_refused(
    tiny_checkpoint: Callable[..., Path], packers: ModuleType, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    extra = {"model.layers.0.self_attn.q_proj.qweight_extra": torch.zeros(3)}
    path, _ = packers.pack_checkpoint(source, tmp_path, packers.gptq(), packers.gptq_settings(), extra=extra)
    stream = open_checkpoint(path).weights()
    with pytest.raises(ValueError, match=r"1 weight is not expected: .*qweight_extra"):
        stream.check({name: stream.spec(name).shape for name in stream.names if "extra" not in name})


def test_unknown_method(tiny_checkpoint: Callable[..., Path], packers: ModuleType, tmp_path: Path) -> None:
    source = tiny_checkpoint("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    path, _ = packers.pack_checkpoint(source, tmp_path, packers.gptq(), {"quant_method": "bitnet"})
    with pytest.raises(ValueError, match="quant_method is 'bitnet', known are awq, compressed-tensors, fp8"):
        open_checkpoint(path).quantized()


def test_a_configuration_alone_says_nothing_of_weights(
    tiny_checkpoint: Callable[..., Path], packers: ModuleType, tmp_path: Path
) -> None:
    source = tiny_checkpoint("llama", hidden_size=64, intermediate_size=96, head_dim=16)
    path, _ = packers.pack_checkpoint(source, tmp_path, packers.gptq(), packers.gptq_settings())
    with pytest.raises(ValueError, match=r"quantization_config is set: .* already quantized"):
        _ = open_checkpoint(path / "config.json").config
