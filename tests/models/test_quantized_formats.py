"""Every format of quantized checkpoints stands for exactly what its own library, or its description, says."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from kvgraph.models.gguf_codes import GGUFCodes
from kvgraph.models.gguf_file import GGUFTensor
from kvgraph.models.quantized import awq, compressed_tensors, fp8, gptq, modelopt
from kvgraph.models.quantized.coded import CodedWeight, DequantizedWeight
from kvgraph.models.safetensors_file import read_tensors

MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"
OUTPUTS, INPUTS = 48, 96
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
COMPRESSED = {
    "int8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, "int8"),
    "int8 of a tensor": ("naive-quantized", {"num_bits": 8, "strategy": "tensor"}, "int8"),
    "uint8": ("naive-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}, "uint8"),
    "packed int4": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, "int4"),
    "packed uint4": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        "uint4",
    ),
    "packed int4 by channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, "int4"),
    "packed int8": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 16}, "int8"),
    "packed uint8": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "channel", "symmetric": False},
        "uint8",
    ),
    "fp8 of a tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        "float8_e4m3fn",
    ),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "float8_e4m3fn"),
    "fp8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 64]},
        "float8_e4m3fn",
    ),
}


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """[O, I] without any order in it, so that a number in a wrong place is a wrong number."""
    return torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(5))


def read(
    reader: ModuleType, packers: ModuleType, packed: Any, settings: dict[str, Any], path: Path
) -> CodedWeight:
    file = path / "model.safetensors"
    packers.write_tensors(file, {f"{MODULE}.{suffix}": tensor for suffix, tensor in packed.tensors.items()})
    found = reader.read_checkpoint(settings, read_tensors(file))
    assert not found.plain
    return found.coded[NAME]


def values(coded: CodedWeight, step: int = 20) -> torch.Tensor:
    """All of the weight, some rows at a time."""
    stored = DequantizedWeight(coded)
    return torch.cat(
        [stored.read_rows(start, min(start + step, OUTPUTS)) for start in range(0, OUTPUTS, step)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors_are_what_the_library_reads(
    case: str, dtype: torch.dtype, packers: ModuleType, weight: torch.Tensor, tmp_path: Path
) -> None:
    form, arguments, expected = COMPRESSED[case]
    packed = packers.compressed(form, arguments, dtype)(weight)
    settings = packers.compressed_settings(form, arguments)
    coded = read(compressed_tensors, packers, packed, settings, tmp_path)
    assert coded.scheme.format == expected
    assert coded.scheme.scale_dtype == dtype
    # The library multiplies in the type of the scales.
    assert torch.equal(values(coded).to(dtype), packed.weight)


@pytest.mark.parametrize("order", [None, 3])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, -1), (8, 16)])
def test_gptq_is_what_its_description_says(
    bits: int,
    group: int,
    symmetric: bool,
    version: int,
    order: int | None,
    packers: ModuleType,
    weight: torch.Tensor,
    tmp_path: Path,
) -> None:
    packed = packers.gptq(bits, group, symmetric, version, order)(weight)
    settings = packers.gptq_settings(bits, group, symmetric, version, order is not None)
    coded = read(gptq, packers, packed, settings, tmp_path)
    assert coded.scheme.format == f"{'' if symmetric else 'u'}int{bits}"
    assert (coded.order is not None) == (order is not None and group != -1)
    assert torch.equal(values(coded), packed.weight)


def test_gptq_honours_exceptions_of_modules(
    packers: ModuleType, weight: torch.Tensor, tmp_path: Path
) -> None:
    packed = packers.gptq(8, 16)(weight)
    settings = {**packers.gptq_settings(4, 32), "dynamic": {r"+:.*\.up_proj": {"bits": 8, "group_size": 16}}}
    assert torch.equal(values(read(gptq, packers, packed, settings, tmp_path)), packed.weight)


def test_awq_is_what_its_description_says(packers: ModuleType, weight: torch.Tensor, tmp_path: Path) -> None:
    packed = packers.awq(32)(weight)
    coded = read(awq, packers, packed, packers.awq_settings(32), tmp_path)
    assert torch.equal(values(coded), packed.weight)


@pytest.mark.parametrize("block", [None, (32, 32), (20, 48)])
def test_float8_blocks_are_what_their_description_says(
    block: tuple[int, int] | None, packers: ModuleType, weight: torch.Tensor, tmp_path: Path
) -> None:
    packed = packers.float8(block)(weight)
    coded = read(fp8, packers, packed, packers.float8_settings(block), tmp_path)
    assert torch.equal(values(coded), packed.weight)
    assert coded.scheme.activation is not None
    assert coded.scheme.activation.block_size == (block[1] if block else None)


def test_modelopt_is_what_its_description_says(
    packers: ModuleType, weight: torch.Tensor, tmp_path: Path
) -> None:
    packed = packers.float8(None, "weight_scale", 0.25)(weight)
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    coded = read(modelopt, packers, packed, settings, tmp_path)
    assert torch.equal(values(coded), packed.weight)
    assert coded.scheme.activation is not None
    assert coded.scheme.activation.scale == 0.25


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("heads", [None, 3])
def test_gguf_blocks_are_what_the_library_reads(
    kind: str, heads: int | None, weight: torch.Tensor, tmp_path: Path
) -> None:
    # Rows that are all zeros have no scale.
    matrix = weight.numpy().copy()
    matrix[3] = 0
    quantized = gguf.GGMLQuantizationType[kind]
    octets = gguf.quants.quantize(matrix, quantized)
    path = tmp_path / "blocks"
    path.write_bytes(octets.tobytes())
    coded = GGUFCodes(GGUFTensor("w", quantized, (OUTPUTS, INPUTS), 0, path), heads)
    expected = gguf.quants.dequantize(octets, quantized)
    if heads is not None:
        # llama.cpp has the two rows of a pair beside each other, Hugging Face half a head apart.
        expected = expected.reshape(heads, -1, 2, INPUTS).swapaxes(1, 2).reshape(OUTPUTS, INPUTS)
    rows = [coded.read(start, min(start + 20, OUTPUTS)) for start in range(0, OUTPUTS, 20)]
    assert all(bool((part.scale > 0).all()) for part in rows)
    np.testing.assert_array_equal(torch.cat([part.dequantize(32) for part in rows]).numpy(), expected)
