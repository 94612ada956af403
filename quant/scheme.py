"""How tensors of one kind are quantized: the data that recipes are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvgraph.quant.formats import FORMATS

ScaleForm = Literal["float", "float32", "float8_e4m3fn", "power_of_two"]
WeightClip = Literal["absmax", "mse"]
ActivationClip = Literal["absmax", "percentile", "mse", "entropy"]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a weight matrix is rounded.

    Attributes:
        format: Number format; "uint4" and "uint8" are asymmetric, with a zero point for each scale.
        block_size: Weights along the input that share a scale; None: all inputs of an output channel share one.
        scale_form: "float": the compute type; "float32": that, whatever the compute type; "float8_e4m3fn": two levels,
            E4M3 block scales times one float32 of the tensor (NVFP4); "power_of_two": a power of two kept in the
            compute type (MXFP4).
        clip: "absmax" covers every value; "mse" picks the range with the least squared error for each scale.
    """

    format: str
    block_size: int | None = None
    scale_form: ScaleForm = "float"
    clip: WeightClip = "absmax"

    def __post_init__(self) -> None:
        _one_of("weight format", self.format, FORMATS)
        _one_of("scale_form", self.scale_form, ("float", "float32", "float8_e4m3fn", "power_of_two"))
        _one_of("weight clip", self.clip, ("absmax", "mse"))
        if self.block_size is not None and (self.block_size < 16 or self.block_size & (self.block_size - 1)):
            raise ValueError(f"block_size is {self.block_size}, expected a power of two of at least 16")
        if self.scale_form not in ("float", "float32") and (
            self.block_size is None or self.format != "float4_e2m1"
        ):
            raise ValueError(f"scale_form {self.scale_form!r} goes with float4_e2m1 in blocks alone")


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How the input of a matrix product is rounded; symmetric, zero point 0.

    Attributes:
        format: "int8" or "float8_e4m3fn".
        granularity: "tensor": one calibrated scale; "token": each row of the input gets its own scale in the graph.
        block_size: Of "token": entries of a row that share a scale; None: all.
        scale_form: Of "tensor": type that the scale is stored in, see `WeightScheme`.
        clip: How a calibrated range is chosen; of no effect per token.
    """

    format: str
    granularity: Literal["tensor", "token"]
    clip: ActivationClip = "absmax"
    block_size: int | None = None
    scale_form: Literal["float", "float32"] = "float"

    def __post_init__(self) -> None:
        _one_of("activation format", self.format, ("int8", "float8_e4m3fn"))
        _one_of("granularity", self.granularity, ("tensor", "token"))
        _one_of("activation clip", self.clip, ("absmax", "percentile", "mse", "entropy"))
        _one_of("activation scale_form", self.scale_form, ("float", "float32"))
        if self.block_size is not None and (self.granularity != "token" or self.block_size < 1):
            raise ValueError(
                f"block_size is {self.block_size} of an input by {self.granularity}; tokens alone have blocks"
            )


@dataclass(frozen=True, slots=True)
class CacheScheme:
    """How the KV cache is rounded.

    Attributes:
        format: "int8" or "float8_e4m3fn".
        granularity: What shares a scale: the whole tensor, a head, or a channel of a head.
        keys: "rotated": keys are kept as attention reads them; "unrotated": as they are before their rotary embedding,
            which is then applied to the whole cache at every step; where a layer has none, or one whose angles depend
            on the total length, keys are kept as they are.
        scale_form: Type that scales are stored in, see `WeightScheme`.
    """

    format: str
    granularity: Literal["tensor", "head", "channel"] = "channel"
    keys: Literal["rotated", "unrotated"] = "rotated"
    scale_form: Literal["float", "float32"] = "float"

    def __post_init__(self) -> None:
        _one_of("cache format", self.format, ("int8", "float8_e4m3fn"))
        _one_of("cache granularity", self.granularity, ("tensor", "head", "channel"))
        _one_of("cache keys", self.keys, ("rotated", "unrotated"))
        _one_of("cache scale_form", self.scale_form, ("float", "float32"))


@dataclass(frozen=True, slots=True)
class ModuleScheme:
    """How one matrix product is quantized.

    Attributes:
        weight: Its matrix.
        activation: Its input; None leaves it float.
    """

    weight: WeightScheme
    activation: ActivationScheme | None = None

    def __post_init__(self) -> None:
        if self.activation is None:
            return
        # Integers are multiplied as integers: their scales must leave the sum.
        whole = self.activation.format != "int8" or (
            self.weight.block_size is None and self.activation.block_size is None
        )
        if self.weight.format != self.activation.format or not whole:
            raise ValueError(
                f"an input in {self.activation.format} goes with a weight of the same format and, of integers, one "
                f"scale for each output channel, not with {self.weight}"
            )


def _one_of(what: str, value: str, known: Iterable[str]) -> None:
    names = list(known)
    if value not in names:
        raise ValueError(f"{what} is {value!r}, expected one of {', '.join(names)}")
