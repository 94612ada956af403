"""Writers of quantized checkpoints, from the formats' public descriptions or by the formats' own libraries.

Each takes a weight [O, I] and gives the tensors of its module and the float32 weight that they stand for. Loaded by the
fixture `packers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """A module's tensors by the last part of their names, and the float32 weight [O, I] that they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


Packer = Callable[[Tensor], Packed]


def pack_words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers [..., n] in words of 32 bits along the last axis, the first in the lowest bits."""
    per_word = 32 // bits
    parts = numbers.astype(np.uint32).reshape(*numbers.shape[:-1], -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(parts << shifts, axis=-1).view(np.int32)


def group_numbers(
    weight: np.ndarray, groups: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [I, O], zero points [G, O] from 1 up, and float16 scales [G, O] of a weight [I, O]."""
    most, count = 2**bits - 1, int(groups.max()) + 1
    scales = np.empty((count, weight.shape[1]), np.float16)
    zeros = np.full(scales.shape, 2 ** (bits - 1))
    for group in range(count):
        part = weight[groups == group]
        low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
        if symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[group] = (high - low) / most
        if not symmetric:
            zeros[group] = np.clip(np.rint(-low / scales[group].astype(np.float32)), 1, most)
    spread = scales.astype(np.float32)[groups]
    codes = np.clip(np.rint(weight / spread) + zeros[groups], 0, most).astype(np.uint8)
    return codes, zeros, scales


def gptq(
    bits: int = 4, group: int = 32, symmetric: bool = True, version: int = 1, seed: int | None = None
) -> Packer:
    """GPTQ; with a seed inputs are sorted into groups, as desc_act does it."""

    def pack(weight: Tensor) -> Packed:
        matrix = weight.float().numpy().T
        inputs = len(matrix)
        size = inputs if group == -1 else group
        groups = np.arange(inputs) // size
        if seed is not None:
            groups[np.random.default_rng(seed).permutation(inputs)] = np.arange(inputs) // size
        codes, zeros, scales = group_numbers(matrix, groups, bits, symmetric)
        stored = zeros - (1 if version == 1 else 0)
        tensors = {
            "qweight": torch.from_numpy(np.ascontiguousarray(pack_words(codes.T, bits).T)),
            "qzeros": torch.from_numpy(pack_words(stored, bits)),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        values = (codes.astype(np.float32) - zeros[groups]) * scales.astype(np.float32)[groups]
        return Packed(tensors, torch.from_numpy(np.ascontiguousarray(values.T.astype(np.float32))))

    return pack


def gptq_settings(
    bits: int = 4, group: int = 32, symmetric: bool = True, version: int = 1, ordered: bool = False
) -> dict[str, Any]:
    """quantization_config of `gptq`."""
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": ordered,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "damp_percent": 0.1,
        "true_sequential": True,
        "lm_head": False,
    }


def awq(group: int = 32) -> Packer:
    """AWQ, version gemm: eight outputs a word, in the order 0, 2, 4, 6, 1, 3, 5, 7."""

    def in_words(numbers: np.ndarray) -> Tensor:
        places = numbers.reshape(len(numbers), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
        return torch.from_numpy(pack_words(places.reshape(numbers.shape), 4))

    def pack(weight: Tensor) -> Packed:
        matrix = weight.float().numpy().T
        groups = np.arange(len(matrix)) // group
        codes, zeros, scales = group_numbers(matrix, groups, 4, symmetric=False)
        tensors = {"qweight": in_words(codes), "qzeros": in_words(zeros), "scales": torch.from_numpy(scales)}
        values = (codes.astype(np.float32) - zeros[groups]) * scales.astype(np.float32)[groups]
        return Packed(tensors, torch.from_numpy(np.ascontiguousarray(values.T.astype(np.float32))))

    return pack


def awq_settings(group: int = 32) -> dict[str, Any]:
    """quantization_config of `awq`."""
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }


def float8(
    block: tuple[int, int] | None, suffix: str = "weight_scale_inv", input_scale: float | None = None
) -> Packer:
    """8-bit floats with a float32 scale for every block of outputs and inputs, or for the whole matrix."""

    def pack(weight: Tensor) -> Packed:
        weight = weight.float()
        rows, columns = block or weight.shape
        scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        values = torch.empty_like(weight)
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                place = (
                    slice(row * rows, (row + 1) * rows),
                    slice(column * columns, (column + 1) * columns),
                )
                scale[row, column] = weight[place].abs().max() / 448
                codes[place] = (weight[place] / scale[row, column]).to(torch.float8_e4m3fn)
                values[place] = codes[place].float() * scale[row, column]
        tensors = {"weight": codes, suffix: scale if block else scale.reshape(())}
        if input_scale is not None:
            tensors["input_scale"] = torch.tensor(input_scale)
        return Packed(tensors, values)

    return pack


def float8_settings(block: tuple[int, int] | None, static: bool = False) -> dict[str, Any]:
    """quantization_config of `float8`."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "fmt": "e4m3",
        "weight_block_size": None if block is None else list(block),
    }


def compressed(
    form: str,
    weights: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    input_scale: float | None = None,
) -> Packer:
    """What compressed-tensors itself writes and reads."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(form)

    def pack(weight: Tensor) -> Packed:
        low, high = _extremes(weight.float(), weights)
        scale, zero_point = calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero_point}
        stored = compressor.compress(state, scheme)
        read_back = compressor.decompress(stored, scheme)["weight"]
        tensors = {name: tensor.contiguous() for name, tensor in stored.items()}
        if input_scale is not None:
            tensors["input_scale"] = torch.tensor([input_scale], dtype=dtype)
        return Packed(tensors, read_back)

    return pack


def _extremes(weight: Tensor, weights: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Least and largest weight of everything that shares a scale."""
    strategy = weights["strategy"]
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "group":
        parts = weight.unflatten(1, (-1, weights["group_size"]))
        return parts.amin(2), parts.amax(2)
    rows, columns = weights["block_structure"]
    blocks = [list(strip.split(columns, 1)) for strip in weight.split(rows, 0)]
    low = torch.stack([torch.stack([part.min() for part in strip]) for strip in blocks])
    high = torch.stack([torch.stack([part.max() for part in strip]) for strip in blocks])
    return low, high


def compressed_settings(
    form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **others: Any
) -> dict[str, Any]:
    """quantization_config of `compressed`, as the library writes it."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        **others,
    }


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file."""
    save_file(dict(tensors), path, metadata={"format": "pt"})


def pack_checkpoint(
    source: Path,
    directory: Path,
    pack: Packer,
    settings: Mapping[str, Any] | None,
    dtype: str = "float32",
    extra: Mapping[str, Tensor] | None = None,
    kept: Collection[str] = ("lm_head", "embed_tokens", "wte"),
) -> tuple[Path, Path]:
    """A float checkpoint with its matrices packed, and beside it the float checkpoint that it stands for."""
    packed, stands_for = directory / "packed", directory / "float"
    tensors: dict[str, Tensor] = dict(extra or {})
    values: dict[str, Tensor] = {}
    float_type = getattr(torch, dtype)
    for name, weight in load_file(source / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or weight.ndim != 2 or module.rpartition(".")[2] in (*kept, "gate"):
            tensors[name] = values[name] = weight.to(float_type)
            continue
        found = pack(weight)
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in found.tensors.items()}
        values[name] = found.weight.to(float_type).contiguous()
    for path, content in ((packed, tensors), (stands_for, values)):
        path.mkdir(parents=True)
        write_tensors(path / "model.safetensors", content)
    config = {**json.loads((source / "config.json").read_text()), "dtype": dtype}
    (stands_for / "config.json").write_text(json.dumps(config))
    if settings is not None:
        config["quantization_config"] = settings
    (packed / "config.json").write_text(json.dumps(config))
    for file in source.glob("*token*"):
        shutil.copy(file, packed)
    return packed, stands_for
