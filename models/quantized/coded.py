"""Weights that a checkpoint holds as codes and scales: what every format of such checkpoints is read into.

A matrix is that of a linear layer, [O, I]. Its values are (code - zero point) * scale, computed in float32, where they
are exact for codes of up to eight bits and scales of sixteen.

| format | codes | zero points |
|---|---|---|
| int8 | int8 | none |
| uint8 | uint8 | uint8 |
| int4 | int8 from -8 to 7 | none |
| uint4 | uint8 from 0 to 15 | uint8 |
| float8_e4m3fn | float8_e4m3fn | none |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from kvgraph.models.weights import StoredWeight, WeightSpec, WeightStream

CodeFormat = Literal["int8", "uint8", "int4", "uint4", "float8_e4m3fn"]


@dataclass(frozen=True, slots=True)
class ActivationCode:
    """How the input of a coded matrix is rounded, symmetrically.

    Attributes:
        format: "int8" or "float8_e4m3fn".
        scale: The scale of the whole input; None: each token has its own, its largest magnitude over the format's.
        block_size: Of an input without a scale: how many entries of a token share one; None: all.
    """

    format: Literal["int8", "float8_e4m3fn"]
    scale: float | None = None
    block_size: int | None = None


@dataclass(frozen=True, slots=True)
class CodeScheme:
    """How a matrix is coded.

    Attributes:
        format: Of the codes.
        block_size: How many inputs share a scale; None: all of them.
        scale_dtype: Type that the checkpoint stores scales in.
        activation: How the input is rounded; None leaves it float.
    """

    format: CodeFormat
    block_size: int | None
    scale_dtype: torch.dtype
    activation: ActivationCode | None = None


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Some outputs of a matrix.

    Attributes:
        codes: [O', I].
        scale: [O', G] with G blocks of inputs, in the stored type.
        zero_point: Like `scale`, or None.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None

    def dequantize(self, block_size: int | None) -> Tensor:
        """[O', I] float32."""
        width = self.codes.shape[1]
        values = self.codes.to(torch.float32)
        if self.zero_point is not None:
            values -= _spread(self.zero_point, block_size, width)
        values *= _spread(self.scale, block_size, width)
        return values


class CodedWeight(Protocol):
    """A coded matrix where it lies."""

    @property
    def spec(self) -> WeightSpec:
        """Name of the float weight that it stands for, its shape, and the file; the type is float32."""

    @property
    def scheme(self) -> CodeScheme:
        """How it is coded."""

    @property
    def order(self) -> Tensor | None:
        """Input of the float matrix that each column of the codes belongs to, [I] int64; None: the same."""

    @property
    def turned(self) -> bool:
        """Whether the float weight is [I, O]."""

    def read(self, start: int, stop: int) -> CodedRows:
        """Outputs `start` to `stop`.

        Raises:
            ValueError: A scale is not a positive number, or a code stands for none.
        """


@dataclass(frozen=True, slots=True)
class DequantizedWeight:
    """The float weight that a coded one stands for.

    Attributes:
        coded: What it is read from.
    """

    coded: CodedWeight

    @property
    def spec(self) -> WeightSpec:
        """See `StoredWeight.spec`."""
        return self.coded.spec

    def read_rows(self, start: int, stop: int) -> Tensor:
        """See `StoredWeight.read_rows`."""
        values = self.coded.read(start, stop).dequantize(self.coded.scheme.block_size)
        if self.coded.order is None:
            return values
        restored = torch.empty_like(values)
        restored[:, self.coded.order] = values
        return restored


@dataclass(frozen=True, slots=True)
class CacheCode:
    """How a checkpoint asks for its KV cache to be rounded: one scale for each tensor.

    Attributes:
        format: "int8" or "float8_e4m3fn".
        scales: (layer, "key" or "value") -> scale.
    """

    format: Literal["int8", "float8_e4m3fn"]
    scales: Mapping[tuple[int, str], float]


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """The tensors of a checkpoint that is quantized.

    Attributes:
        method: "gptq".
        settings: What the checkpoint says of its quantization, as it stands.
        coded: Name of a float weight -> the coded one in its place.
        plain: The other tensors.
        cache: What becomes of the cache; None leaves it float.
    """

    method: str
    settings: Mapping[str, Any]
    coded: Mapping[str, CodedWeight]
    plain: Mapping[str, StoredWeight]
    cache: CacheCode | None = None

    def float_weights(self, source: Path, config_name: str = "config.json") -> WeightStream:
        """All weights as float ones.

        Args:
            source: The checkpoint, to be named in errors.
            config_name: What describes the model.
        """
        coded = {name: DequantizedWeight(weight) for name, weight in self.coded.items()}
        return WeightStream(source, {**coded, **self.plain}, config_name)


def _spread(per_block: Tensor, block_size: int | None, width: int) -> Tensor:
    """[O', G] as float32 that broadcasts against [O', width]."""
    values = per_block.to(torch.float32)
    return values if block_size is None else values.repeat_interleave(block_size, dim=1)[:, :width]
