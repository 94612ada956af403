"""Coded matrices stored an input after another, in words of 32 bits: GPTQ and AWQ.

| | codes | zero points | scales |
|---|---|---|---|
| GPTQ | [I / n, O]: a word holds n inputs of an output | [G, O / n] | [G, O] |
| AWQ | [I, O / 8]: a word holds eight outputs of an input | [G, O / 8] | [G, O] |

The first number is in the lowest bits. AWQ puts the outputs of a word into the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvgraph.models.quantized.coded import CodedRows, CodeScheme
from kvgraph.models.quantized.tensors import read_whole, require_scales, unpack_bytes
from kvgraph.models.weights import SafetensorsWeight, WeightSpec

# Where in a word of AWQ each of its outputs lies.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True, slots=True)
class ColumnCodes:
    """A coded matrix whose inputs lie one after another; it is unpacked as a whole.

    Attributes:
        name: Of the float weight.
        shape: [O, I].
        scheme: How it is coded; "int4" and "int8" have zero points that are all half of the range.
        bits: Of a code.
        layout: How codes lie in words.
        codes: int32.
        zero_point: int32.
        scale: [G, O].
        zero_offset: What a stored zero point is less than the one it stands for.
        order: See `CodedWeight.order`.
        turned: See `CodedWeight.turned`.
    """

    name: str
    shape: tuple[int, int]
    scheme: CodeScheme
    bits: Literal[4, 8]
    layout: Literal["gptq", "awq"]
    codes: SafetensorsWeight
    zero_point: SafetensorsWeight
    scale: SafetensorsWeight
    zero_offset: int
    order: Tensor | None
    turned: bool = False

    @property
    def spec(self) -> WeightSpec:
        """See `CodedWeight.spec`."""
        return WeightSpec(self.name, torch.float32, self.shape, self.codes.stored.file)

    def read(self, start: int, stop: int) -> CodedRows:
        """See `CodedWeight.read`."""
        scale = read_whole(self.scale)[:, start:stop]
        require_scales(scale, f"{self.codes.stored.file}: {self.scale.stored.name}")
        codes, zero_point = self._codes(start, stop), self._zero_points(start, stop)
        if self.order is not None:
            codes = codes[:, self.order]
        if self.scheme.format.startswith("u"):
            return CodedRows(codes, scale.T.contiguous(), zero_point)
        half = 1 << (self.bits - 1)
        if bool((zero_point != half).any()):
            other = int(zero_point[zero_point != half][0])
            raise ValueError(
                f"{self.codes.stored.file}: {self.zero_point.stored.name} holds {other}, but the settings say "
                f"symmetric, which is {half}"
            )
        return CodedRows((codes.to(torch.int16) - half).to(torch.int8), scale.T.contiguous())

    def _codes(self, start: int, stop: int) -> Tensor:
        """[O', I] uint8."""
        words = read_whole(self.codes)
        if self.layout == "awq":
            return _in_order(unpack_bytes(words.view(torch.uint8), 4))[:, start:stop].T.contiguous()
        # [I / n, O'] words, of which each is n inputs.
        octets = words[:, start:stop].contiguous().unsqueeze(-1).view(torch.uint8)
        inputs = unpack_bytes(octets, self.bits)
        return inputs.transpose(0, 1).reshape(stop - start, -1)

    def _zero_points(self, start: int, stop: int) -> Tensor:
        """[O', G] uint8.

        Raises:
            ValueError: One is out of the codes' range.
        """
        stored = unpack_bytes(read_whole(self.zero_point).view(torch.uint8), self.bits)
        stored = _in_order(stored) if self.layout == "awq" else stored
        meant = stored[:, start:stop].T.to(torch.int16) + self.zero_offset
        most = (1 << self.bits) - 1
        if int(meant.max()) > most:
            raise ValueError(
                f"{self.codes.stored.file}: {self.zero_point.stored.name} stands for {int(meant.max())}, expected at "
                f"most {most}; quantize the model again, as checkpoint_format gptq_v2"
            )
        return meant.to(torch.uint8)


def _in_order(numbers: Tensor) -> Tensor:
    """Numbers [..., O] unpacked from words of AWQ, as outputs follow one another."""
    words = numbers.reshape(*numbers.shape[:-1], -1, 8)
    return words[..., _AWQ_PLACES].reshape(numbers.shape)
