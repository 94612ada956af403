"""One module of a checkpoint of compressed-tensors."""

from __future__ import annotations

import torch

from kvgraph.models.quantized.coded import ActivationCode, CodedWeight, CodeFormat, CodeScheme
from kvgraph.models.quantized.compressed_scheme import Group, WeightSettings
from kvgraph.models.quantized.input_order import input_order
from kvgraph.models.quantized.row_codes import RowCodes, ScaleTensor
from kvgraph.models.quantized.tensors import SCALE_DTYPES, ModuleTensors, read_whole
from kvgraph.models.weights import SafetensorsWeight


def read_module(module: ModuleTensors, group: Group) -> CodedWeight:
    """A module's weight, with everything that its group in the settings says.

    Raises:
        ValueError: A tensor is missing or of another type or shape than the settings ask for.
    """
    weights, packed = group.weights, module.has("weight_packed")
    if group.packed not in (None, packed):
        raise module.error(f"its codes are {'' if packed else 'not '}packed, its format says otherwise")
    bits = weights.bits if packed else None
    if not packed and weights.bits == 4:
        raise module.error("weight_packed is missing; codes of 4 bits are always packed")
    shape, codes = _packed_codes(module, weights.bits) if packed else _plain_codes(module, weights)
    block_size, scale = _scale(module, weights, shape)
    zero_point = _zero_point(module, weights, shape, scale, packed)
    return RowCodes(
        name=f"{module.module}.weight",
        shape=shape,
        scheme=CodeScheme(
            _format(weights), block_size, scale.stored.spec.dtype, _activation(module, group, shape)
        ),
        codes=codes,
        packed_bits=4 if bits == 4 else 8 if bits == 8 else None,
        scale=scale,
        zero_point=zero_point,
        offset=_offset(weights, packed),
        order=_order(module, weights, shape),
    )


def _format(weights: WeightSettings) -> CodeFormat:
    if weights.kind == "float":
        return "float8_e4m3fn"
    if weights.bits == 4:
        return "int4" if weights.symmetric else "uint4"
    return "int8" if weights.symmetric else "uint8"


def _offset(weights: WeightSettings, packed: bool) -> int:
    """From stored integers to codes: packed ones are unsigned, the others signed."""
    half = 1 << (weights.bits - 1)
    if packed:
        return -half if weights.symmetric else 0
    return 0 if weights.symmetric else half


def _plain_codes(module: ModuleTensors, weights: WeightSettings) -> tuple[tuple[int, int], SafetensorsWeight]:
    dtype = torch.int8 if weights.kind == "int" else torch.float8_e4m3fn
    codes = module.find("weight", (dtype,))
    return _matrix(module, codes.spec.shape), codes


def _packed_codes(module: ModuleTensors, bits: int) -> tuple[tuple[int, int], SafetensorsWeight]:
    stored = module.find("weight_shape", (torch.int64, torch.int32), ((2,),))
    outputs, inputs = (int(size) for size in read_whole(stored))
    words = -(-inputs * bits // 32)
    return (outputs, inputs), module.find("weight_packed", (torch.int32,), ((outputs, words),))


def _matrix(module: ModuleTensors, shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2:
        raise module.error(f"weight has shape {list(shape)}, expected [outputs, inputs]")
    return shape[0], shape[1]


def _scale(
    module: ModuleTensors, weights: WeightSettings, shape: tuple[int, int]
) -> tuple[int | None, ScaleTensor]:
    """Inputs that share a scale, and the scales."""
    outputs, inputs = shape
    if weights.strategy == "tensor":
        return None, ScaleTensor(module.find("weight_scale", SCALE_DTYPES, ((), (1,), (1, 1))), None)
    if weights.strategy == "channel":
        return None, ScaleTensor(module.find("weight_scale", SCALE_DTYPES, ((outputs, 1), (outputs,))), 1)
    if weights.block is not None:
        rows, columns = weights.block
        expected = (-(-outputs // rows), -(-inputs // columns))
        return columns, ScaleTensor(module.find("weight_scale", SCALE_DTYPES, (expected,)), rows)
    size = weights.group_size
    assert size is not None
    if inputs % size:
        raise module.error(f"group_size {size} does not divide its {inputs} inputs")
    return size, ScaleTensor(module.find("weight_scale", SCALE_DTYPES, ((outputs, inputs // size),)), 1)


def _zero_point(
    module: ModuleTensors, weights: WeightSettings, shape: tuple[int, int], scale: ScaleTensor, packed: bool
) -> ScaleTensor | None:
    name, stored_shape = "weight_zero_point", scale.stored.spec.shape
    if weights.symmetric:
        # Older files hold the zeros.
        if module.has(name):
            zeros = read_whole(module.find(name, (torch.int8, torch.float8_e4m3fn), (stored_shape,)))
            if bool(zeros.to(torch.float32).any()):
                raise module.error(f"{name} is not 0, but the settings say symmetric")
        return None
    if packed and weights.strategy in ("channel", "group"):
        words, groups = -(-shape[0] * weights.bits // 32), stored_shape[-1]
        return ScaleTensor(module.find(name, (torch.int32,), ((words, groups),)), 1, weights.bits)
    return ScaleTensor(module.find(name, (torch.int8,), (stored_shape,)), scale.rows)


def _order(module: ModuleTensors, weights: WeightSettings, shape: tuple[int, int]) -> torch.Tensor | None:
    if not module.has("weight_g_idx"):
        if weights.ordered:
            raise module.error("weight_g_idx is missing, which actorder 'group' needs")
        return None
    groups = read_whole(module.find("weight_g_idx", (torch.int32, torch.int64), ((shape[1],),)))
    if weights.group_size is None:
        raise module.error("has a weight_g_idx, but the settings do not put its inputs into groups")
    return input_order(groups, weights.group_size, f"{module.file}: {module.module}.weight_g_idx")


def _activation(module: ModuleTensors, group: Group, shape: tuple[int, int]) -> ActivationCode | None:
    inputs = group.inputs
    if inputs is None:
        return None
    if inputs.dynamic:
        if inputs.group_size is not None and shape[1] % inputs.group_size:
            raise module.error(f"group_size {inputs.group_size} does not divide its {shape[1]} inputs")
        return ActivationCode(inputs.format, None, inputs.group_size)
    if module.has("input_zero_point"):
        zeros = read_whole(module.find("input_zero_point", (torch.int8, torch.float8_e4m3fn)))
        if bool(zeros.to(torch.float32).any()):
            raise module.error("input_zero_point is not 0, but the settings say symmetric")
    return ActivationCode(inputs.format, module.scalar("input_scale"))
