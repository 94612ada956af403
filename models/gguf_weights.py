"""The tensors of a GGUF file as weights of a Hugging Face checkpoint: dequantized, and llama.cpp's changes undone.

Each class here is a `StoredWeight`. One reads rows as they lie in the file; the others wrap it and turn what was
changed by the conversion to GGUF back, a few rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from kvgraph.models.gguf_file import GGUFTensor
from kvgraph.models.weights import StoredWeight, WeightSpec, read_bytes

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
# What the gguf package turns into float32. Types for activations (Q8_1, Q8_K) and integers are no weights.
QUANTIZED_TYPES = (
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
    GGMLQuantizationType.IQ1_S,
    GGMLQuantizationType.IQ1_M,
    GGMLQuantizationType.IQ2_XXS,
    GGMLQuantizationType.IQ2_XS,
    GGMLQuantizationType.IQ2_S,
    GGMLQuantizationType.IQ3_XXS,
    GGMLQuantizationType.IQ3_S,
    GGMLQuantizationType.IQ4_NL,
    GGMLQuantizationType.IQ4_XS,
)
# The gguf package holds a few copies of what it works on.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class GGUFWeight:
    """A tensor as it lies in the file; quantized types are read as float32.

    Attributes:
        tensor: Where it lies.
    """

    tensor: GGUFTensor

    @property
    def spec(self) -> WeightSpec:
        """See `StoredWeight.spec`."""
        tensor = self.tensor
        return WeightSpec(tensor.name, stored_dtype(tensor), tensor.shape, tensor.file)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight.read_rows`."""
        spec, row_bytes = self.spec, self.tensor.nbytes // self.tensor.shape[0]
        rows = torch.empty((stop - start, *spec.shape[1:]), dtype=spec.dtype)
        if self.tensor.type in _FLOATS:
            raw = rows.reshape(-1).view(torch.uint8).numpy()
            read_bytes(raw, self.tensor.file, self.tensor.offset + start * row_bytes, spec.name)
            return rows
        step = max(1, PIECE_BYTES // row_bytes)
        for first in range(start, stop, step):
            count = min(step, stop - first)
            raw = np.empty(count * row_bytes, dtype=np.uint8)
            read_bytes(raw, self.tensor.file, self.tensor.offset + first * row_bytes, spec.name)
            values = dequantize(raw.reshape(-1, self._innermost_bytes), self.tensor.type)
            rows[first - start : first - start + count] = torch.from_numpy(values).view(
                count, *spec.shape[1:]
            )
        return rows

    @property
    def _innermost_bytes(self) -> int:
        """Bytes of one run along the last axis, which is made of whole blocks."""
        return replace(self.tensor, shape=self.tensor.shape[-1:]).nbytes


def stored_dtype(tensor: GGUFTensor) -> torch.dtype:
    """The type that a tensor is read as.

    Raises:
        ValueError: It is of a type that is no weight, or that cannot be read by rows.
    """
    if tensor.type in _FLOATS:
        return _FLOATS[tensor.type]
    if tensor.type not in QUANTIZED_TYPES or len(tensor.shape) < 2:
        known = ", ".join(kind.name for kind in (*_FLOATS, *QUANTIZED_TYPES))
        raise ValueError(
            f"{tensor.file}: tensor {tensor.name!r} of shape {list(tensor.shape)} has type {tensor.type.name}; known "
            f"are {known}, for vectors the first three"
        )
    return torch.float32


@dataclass(frozen=True, slots=True)
class HeadsInHalves:
    """Query or key rows in the order of Hugging Face.

    A rotation turns two dimensions of a head as a pair. llama.cpp has the two beside each other for Llama, and
    Hugging Face has all first ones before all second ones.

    Attributes:
        base: [heads * D, ...] with rows (head, pair, first or second).
        heads: Number of heads; D is even.
    """

    base: StoredWeight
    heads: int

    @property
    def spec(self) -> WeightSpec:
        """See `StoredWeight.spec`."""
        return self.base.spec

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight.read_rows`."""
        head_dim = self.spec.shape[0] // self.heads
        first, last = start // head_dim * head_dim, -(-stop // head_dim) * head_dim
        rows = self.base.read_rows(first, last)
        pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)[start - first : stop - first]


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix turned.

    Whatever rows are wanted, all of the stored ones are read: only small models, GPT-2's, store what has to be turned.

    Attributes:
        base: [C, R]; this is [R, C].
    """

    base: StoredWeight

    @property
    def spec(self) -> WeightSpec:
        """See `StoredWeight.spec`."""
        spec = self.base.spec
        return replace(spec, shape=spec.shape[::-1])

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight.read_rows`."""
        spec = self.spec
        height, width = spec.shape
        turned = torch.empty((stop - start, width), dtype=spec.dtype)
        step = max(1, PIECE_BYTES // (height * spec.dtype.itemsize))
        for first in range(0, width, step):
            last = min(first + step, width)
            turned[:, first:last] = self.base.read_rows(first, last)[:, start:stop].T
        return turned


@dataclass(frozen=True, slots=True)
class LessOne:
    """A norm's weight w of which the file holds 1 + w, as float32.

    Taking the one away is exact, for what the sum was rounded to has no bits that the difference would have to round.

    Attributes:
        base: 1 + w.
    """

    base: StoredWeight

    @property
    def spec(self) -> WeightSpec:
        """See `StoredWeight.spec`."""
        return replace(self.base.spec, dtype=torch.float32)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight.read_rows`."""
        return self.base.read_rows(start, stop).to(torch.float32) - 1
