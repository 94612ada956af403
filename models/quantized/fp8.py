"""Checkpoints of 8-bit floats: `quant_method` "fp8", in blocks of 128 x 128 or with one scale for a matrix.

| tensor | shape | meaning |
|---|---|---|
| weight | [O, I] float8_e4m3fn | codes |
| weight_scale_inv, or weight_scale | [O / 128, I / 128], or [] | what codes are multiplied by, whatever the name says |
| input_scale, or activation_scale | [] | scale of the input, with `activation_scheme` "static" |

With `activation_scheme` "dynamic" every token's input is rounded by scales of its own: one for each 128 entries where
weights are in blocks, else one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvgraph.models.config_reader import ConfigReader
from kvgraph.models.quantized.coded import ActivationCode, CodedWeight, CodeScheme, QuantizedCheckpoint
from kvgraph.models.quantized.modules import read_modules, require_coded
from kvgraph.models.quantized.row_codes import RowCodes, ScaleTensor
from kvgraph.models.quantized.settings import WHERE, refuse_unread, texts
from kvgraph.models.quantized.tensors import SCALE_DTYPES, ModuleTensors
from kvgraph.models.safetensors_file import StoredTensor

METHOD = "fp8"
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
_HARMLESS = ("quant_method", "dequantize")


@dataclass(frozen=True, slots=True)
class _Settings:
    """What config.json says.

    Attributes:
        static: Whether inputs have one scale; else each token has its own.
        block: Outputs and inputs that share a scale; None: all of a matrix.
        kept: Modules that are not quantized.
    """

    static: bool
    block: tuple[int, int] | None
    kept: tuple[str, ...]


def read_checkpoint(settings: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> QuantizedCheckpoint:
    """The tensors of a checkpoint, coded ones put together.

    Args:
        settings: `quantization_config` of config.json.
        tensors: Everything that the files hold.

    Raises:
        ValueError: The settings say what is not implemented, or the tensors contradict them.
    """
    known = _read_settings(settings)
    found = read_modules(METHOD, settings, tensors, partial(_read_module, settings=known))
    return require_coded(found, WHERE, _SCALES[0])


def read_float8_matrix(
    module: ModuleTensors,
    suffix: str,
    block: tuple[int, int] | None,
    activation: ActivationCode | None,
) -> CodedWeight:
    """A module's matrix of 8-bit floats.

    Args:
        module: Its tensors.
        suffix: Name of its scales.
        block: Outputs and inputs that share one; None: all of the matrix.
        activation: How its input is rounded.

    Raises:
        ValueError: A tensor is missing or of another type or shape.
    """
    codes = module.find("weight", (torch.float8_e4m3fn,))
    if len(codes.spec.shape) != 2:
        raise module.error(f"weight has shape {list(codes.spec.shape)}, expected [outputs, inputs]")
    outputs, inputs = codes.spec.shape
    if block is None:
        scale = ScaleTensor(module.find(suffix, SCALE_DTYPES, ((), (1,), (1, 1))), None)
    else:
        rows, columns = block
        shape = (-(-outputs // rows), -(-inputs // columns))
        scale = ScaleTensor(module.find(suffix, SCALE_DTYPES, (shape,)), rows)
    return RowCodes(
        name=f"{module.module}.weight",
        shape=(outputs, inputs),
        scheme=CodeScheme(
            "float8_e4m3fn", None if block is None else block[1], scale.stored.spec.dtype, activation
        ),
        codes=codes,
        packed_bits=None,
        scale=scale,
    )


def refuse_float8(module: ModuleTensors, suffix: str) -> None:
    """Refuse 8-bit floats in a module that lacks its scales, `suffix`.

    Raises:
        ValueError: Its weight is of them.
    """
    weight = module.stored("weight")
    if weight is not None and weight.dtype == "F8_E4M3":
        raise module.error(f"{suffix} is missing, without which its codes stand for nothing")


def _read_settings(settings: Mapping[str, Any]) -> _Settings:
    reader = ConfigReader(settings, WHERE)
    scheme = reader.text("activation_scheme").lower()
    if scheme not in ("dynamic", "static"):
        raise reader.error(f"activation_scheme is {scheme!r}, expected 'dynamic' or 'static'")
    for key, value in (("fmt", "e4m3"), ("scale_fmt", "float"), ("expert_dtype", "fp8")):
        reader.require(key, value, "other formats are not implemented")
    block = reader.value("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)
    ):
        raise reader.error(f"weight_block_size is {block!r}, expected two numbers such as [128, 128]")
    if block is not None and scheme == "static":
        raise reader.error("activation_scheme is 'static', which goes with one scale for a matrix")
    kept = (*texts(reader, "modules_to_not_convert"), *texts(reader, "ignored_layers"))
    refuse_unread(reader, _HARMLESS)
    return _Settings(scheme == "static", None if block is None else (block[0], block[1]), kept)


def _read_module(module: ModuleTensors, settings: _Settings) -> CodedWeight | None:
    suffix = next((name for name in _SCALES if module.has(name)), None)
    if suffix is None:
        refuse_float8(module, _SCALES[0])
        return None
    if kept := [name for name in settings.kept if f"{module.module}.".startswith(f"{name}.")]:
        raise module.error(f"has a {suffix}, but {WHERE} keeps {kept[0]!r} float")
    if not settings.static:
        width = None if settings.block is None else settings.block[1]
        inputs = module.find("weight", (torch.float8_e4m3fn,)).spec.shape[-1]
        if width is not None and inputs % width:
            raise module.error(
                f"its {inputs} inputs are no whole blocks of {width}, by which inputs are rounded"
            )
        activation = ActivationCode("float8_e4m3fn", None, width)
    else:
        name = next((name for name in _INPUT_SCALES if module.has(name)), _INPUT_SCALES[0])
        activation = ActivationCode("float8_e4m3fn", module.scalar(name))
    return read_float8_matrix(module, suffix, settings.block, activation)
