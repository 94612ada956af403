"""Blocks of GGUF files as coded weights: 32 inputs of an output, their scale d as float16 before them.

| type | bytes of a block | code | value |
|---|---|---|---|
| Q8_0 | d, 32 of int8 | c | d * c |
| Q4_0 | d, 16 with inputs 0 to 15 in their low halves and 16 to 31 in their high halves | c | d * (c - 8) |

Half of the d of Q4_0 are negative, and graphs want positive scales: d * (c - 8) is (-d) * ((15 - c) - 7). Codes then
have zero points, 8 or 7. A d of 0 stands for zeros: the scale is 1, and so are the codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from kvgraph.models.gguf_file import GGUFTensor
from kvgraph.models.gguf_weights import GGUFWeight, HeadsInHalves, Transposed
from kvgraph.models.quantized.coded import CodedRows, CodedWeight, CodeFormat, CodeScheme
from kvgraph.models.weights import StoredWeight, WeightSpec, read_bytes

BLOCK = 32
FORMATS: Mapping[GGMLQuantizationType, CodeFormat] = {
    GGMLQuantizationType.Q8_0: "int8",
    GGMLQuantizationType.Q4_0: "uint4",
}
_SCALE_BYTES = 2
_HALF = 8


@dataclass(frozen=True, slots=True)
class GGUFCodes:
    """A matrix of Q8_0 or Q4_0; see `CodedWeight`.

    Attributes:
        tensor: Where it lies, [O, I].
        heads: Of query or key rows that have their pairs beside each other, see `HeadsInHalves`; else None.
        turned: Whether the float weight of that name is [I, O].
    """

    tensor: GGUFTensor
    heads: int | None = None
    turned: bool = False

    @property
    def spec(self) -> WeightSpec:
        """See `CodedWeight.spec`."""
        shape = self.tensor.shape[::-1] if self.turned else self.tensor.shape
        return WeightSpec(self.tensor.name, torch.float32, shape, self.tensor.file)

    @property
    def scheme(self) -> CodeScheme:
        """See `CodedWeight.scheme`."""
        return CodeScheme(FORMATS[self.tensor.type], BLOCK, torch.float16)

    @property
    def order(self) -> Tensor | None:
        """See `CodedWeight.order`."""
        return None

    def read(self, start: int, stop: int) -> CodedRows:
        """See `CodedWeight.read`."""
        if self.heads is None:
            return self._read(start, stop)
        head_dim = self.tensor.shape[0] // self.heads
        first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim
        rows = self._read(first, last)
        places = torch.arange(last - first).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)
        places = places[start - first : stop - first]
        zero_point = None if rows.zero_point is None else rows.zero_point[places]
        return CodedRows(rows.codes[places], rows.scale[places], zero_point)

    def _read(self, start: int, stop: int) -> CodedRows:
        """Outputs as the file has them."""
        inputs = self.tensor.shape[1]
        _, block_bytes = GGML_QUANT_SIZES[self.tensor.type]
        raw = np.empty((stop - start, inputs // BLOCK, block_bytes), np.uint8)
        offset = self.tensor.offset + start * raw[:1].size
        read_bytes(raw.reshape(-1), self.tensor.file, offset, self.tensor.name)
        octets = torch.from_numpy(raw)
        scale = octets[..., :_SCALE_BYTES].contiguous().view(torch.float16)
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(
                f"{self.tensor.file}: tensor {self.tensor.name!r} holds a scale that is no number"
            )
        codes = octets[..., _SCALE_BYTES:]
        rows = (
            self._bytes(codes, scale)
            if self.tensor.type == GGMLQuantizationType.Q8_0
            else _halves(codes, scale)
        )
        zero_point = None if rows.zero_point is None else rows.zero_point.flatten(1)
        return CodedRows(rows.codes.flatten(1), rows.scale.flatten(1), zero_point)

    def _bytes(self, octets: Tensor, scale: Tensor) -> CodedRows:
        """Q8_0, [O', G, 32] and [O', G, 1]."""
        if bool((scale < 0).any()):
            raise ValueError(f"{self.tensor.file}: tensor {self.tensor.name!r} holds a negative scale")
        codes = torch.where(scale == 0, 0, octets.contiguous().view(torch.int8))
        return CodedRows(codes, torch.where(scale == 0, 1, scale))


def _halves(octets: Tensor, scale: Tensor) -> CodedRows:
    """Q4_0, [O', G, 16] and [O', G, 1]."""
    codes = torch.cat((octets & 0x0F, octets >> 4), dim=-1)
    codes = torch.where(scale == 0, _HALF, codes)
    zero_point = torch.where(scale < 0, _HALF - 1, torch.full_like(scale, _HALF, dtype=torch.uint8))
    return CodedRows(
        torch.where(scale < 0, 15 - codes, codes), torch.where(scale == 0, 1, scale.abs()), zero_point
    )


def coded_weights(weights: Mapping[str, StoredWeight]) -> dict[str, CodedWeight]:
    """Those of a file's weights that are matrices of Q8_0 or Q4_0.

    Args:
        weights: From `hugging_face_weights`.
    """
    coded: dict[str, CodedWeight] = {}
    for name, weight in weights.items():
        found = _codes(weight)
        if found is not None:
            coded[name] = found
    return coded


def _codes(weight: StoredWeight) -> GGUFCodes | None:
    """The codes of a weight, restored as the weight itself is."""
    if isinstance(weight, GGUFWeight):
        known = weight.tensor.type in FORMATS and len(weight.tensor.shape) == 2
        return GGUFCodes(weight.tensor) if known else None
    if not isinstance(weight, HeadsInHalves | Transposed):
        return None
    base = _codes(weight.base)
    if base is None:
        return None
    return (
        replace(base, heads=weight.heads) if isinstance(weight, HeadsInHalves) else replace(base, turned=True)
    )
