"""Coded matrices stored an output after another: compressed-tensors, and FP8 in all its granularities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvgraph.models.quantized.coded import CodedRows, CodeScheme
from kvgraph.models.quantized.tensors import read_whole, require_numbers, require_scales, unpack_bytes
from kvgraph.models.weights import SafetensorsWeight, WeightSpec


@dataclass(frozen=True, slots=True)
class ScaleTensor:
    """Scales, or zero points, and what shares one.

    Attributes:
        stored: [] or [1] for all; [O] or [O, G] for each output; [R, G] for every `rows` outputs.
        rows: How many outputs share one; None: all.
        packed_bits: Numbers of so many bits in words of 32 along the outputs; None: one an element.
    """

    stored: SafetensorsWeight
    rows: int | None
    packed_bits: int | None = None

    def read(self, start: int, stop: int) -> Tensor:
        """Those of outputs `start` to `stop`, [O', G]."""
        if self.rows is None:
            return read_whole(self.stored).reshape(1, 1).expand(stop - start, 1)
        if self.packed_bits is not None:
            return self._unpacked(start, stop, self.packed_bits)
        first = start // self.rows
        values = self.stored.read_rows(first, -(-stop // self.rows))
        values = values.reshape(len(values), -1)
        if self.rows == 1:
            return values
        spread = values.repeat_interleave(self.rows, dim=0)
        return spread[start - first * self.rows : stop - first * self.rows]

    def _unpacked(self, start: int, stop: int, bits: int) -> Tensor:
        per_word = 32 // bits
        first = start // per_word
        words = self.stored.read_rows(first, -(-stop // per_word))
        # [W, G] words, of which each is some outputs.
        numbers = unpack_bytes(words.unsqueeze(-1).view(torch.uint8), bits).transpose(1, 2).flatten(0, 1)
        return numbers[start - first * per_word : stop - first * per_word]


@dataclass(frozen=True, slots=True)
class RowCodes:
    """A coded matrix whose outputs lie one after another.

    Attributes:
        name: Of the float weight.
        shape: [O, I].
        scheme: How it is coded.
        codes: [O, I], or packed [O, words] along the inputs.
        packed_bits: Bits of a packed code; None: one code an element.
        scale: Its scales.
        zero_point: Its zero points, in the offset of `codes`.
        offset: What is added to codes and zero points as they are stored.
        order: See `CodedWeight.order`.
        turned: See `CodedWeight.turned`.
    """

    name: str
    shape: tuple[int, int]
    scheme: CodeScheme
    codes: SafetensorsWeight
    packed_bits: Literal[4, 8] | None
    scale: ScaleTensor
    zero_point: ScaleTensor | None = None
    offset: int = 0
    order: Tensor | None = None
    turned: bool = False

    @property
    def spec(self) -> WeightSpec:
        """See `CodedWeight.spec`."""
        return WeightSpec(self.name, torch.float32, self.shape, self.codes.stored.file)

    def read(self, start: int, stop: int) -> CodedRows:
        """See `CodedWeight.read`."""
        scale = self.scale.read(start, stop)
        require_scales(scale, f"{self.codes.stored.file}: {self.scale.stored.stored.name}")
        codes = self.codes.read_rows(start, stop)
        if self.packed_bits is not None:
            codes = unpack_bytes(codes.view(torch.uint8), self.packed_bits)[:, : self.shape[1]]
        if codes.dtype == torch.float8_e4m3fn:
            require_numbers(codes, f"{self.codes.stored.file}: {self.codes.stored.name}")
        zero_point = None if self.zero_point is None else self._shift(self.zero_point.read(start, stop))
        if self.order is not None:
            codes = codes[:, self.order]
        return CodedRows(self._shift(codes), scale, zero_point)

    def _shift(self, numbers: Tensor) -> Tensor:
        """Stored numbers as codes: both are bytes, whose highest bit says where the other kind has its zero."""
        if numbers.dtype == torch.float8_e4m3fn:
            return numbers
        unsigned = self.scheme.format.startswith("u")
        shifted = numbers.to(torch.int16) + self.offset
        return shifted.to(torch.uint8 if unsigned else torch.int8)
