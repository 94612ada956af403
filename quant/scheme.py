"""How one kind of tensor is quantized: the data that recipes are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvgraph.quant.formats import FORMATS

WeightFormat = Literal["int8", "int4", "uint4", "float8_e4m3fn", "float4_e2m1"]
ScaleForm = Literal["float", "float8_e4m3fn", "power_of_two"]
Clip = Literal["absmax", "mse"]


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How a weight matrix is rounded.

    Attributes:
        format: Number format; "uint4" is asymmetric, with a zero point for each scale.
        block_size: Weights along the input that share a scale; None: all inputs of an output channel share one.
        scale_form: "float": the compute type; "float8_e4m3fn": two levels, E4M3 block scales times one float32 of the
            tensor (NVFP4); "power_of_two": a power of two kept in the compute type (MXFP4).
        clip: "absmax" covers every value; "mse" picks the range with the least squared error for each scale.
    """

    format: WeightFormat
    block_size: int | None = None
    scale_form: ScaleForm = "float"
    clip: Clip = "absmax"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"weight format is {self.format!r}, expected one of {', '.join(FORMATS)}")
        if self.block_size is not None and (self.block_size < 16 or self.block_size & (self.block_size - 1)):
            raise ValueError(f"block_size is {self.block_size}, expected a power of two of at least 16")
        if self.scale_form != "float" and (self.block_size is None or self.format != "float4_e2m1"):
            raise ValueError(f"scale_form {self.scale_form!r} goes with float4_e2m1 in blocks alone")
