"""The weights of a checkpoint as a stream: a few rows of one tensor at a time.

Rows are read into a buffer of their own instead of being mapped. Mapped pages count as the process's memory until
the kernel takes them back, so that copying a checkpoint through a mapping peaks at the size of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from kvgraph.models.safetensors_file import StoredTensor
from kvgraph.models.shards import stored_tensors

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}
# What a weight may be; anything else is a quantized checkpoint or not a weight.
READABLE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """What is known of a weight without reading it; its name is that in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StoredWeight(Protocol):
    """A weight where it lies, whatever the format of the file."""

    @property
    def spec(self) -> WeightSpec:
        """What is known of it without reading it."""

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of it, which are known to be there, in the type that `spec` names."""


@dataclass(frozen=True, slots=True)
class SafetensorsWeight:
    """A weight in a safetensors file.

    Attributes:
        stored: Where it lies.
    """

    stored: StoredTensor

    @property
    def spec(self) -> WeightSpec:
        """See `StoredWeight.spec`."""
        stored = self.stored
        return WeightSpec(stored.name, TORCH_DTYPES[stored.dtype], stored.shape, stored.file)

    def read_rows(self, start: int, stop: int) -> torch.Tensor:
        """See `StoredWeight.read_rows`."""
        spec = self.spec
        row_bytes = spec.nbytes // max(spec.shape[0], 1)
        # NumPy asks for huge pages, which a matrix takes in a fraction of the time that small ones take.
        size = (stop - start) * row_bytes
        raw = torch.from_numpy(np.empty(size, np.uint8)) if size else torch.empty(0, dtype=torch.uint8)
        read_bytes(raw.numpy(), spec.file, self.stored.offset + start * row_bytes, spec.name)
        return raw.view(spec.dtype).view(stop - start, *spec.shape[1:])


class WeightStream:
    """The weights of a checkpoint: their names and shapes at once, their values on request."""

    def __init__(
        self,
        source: Path,
        weights: Mapping[str, StoredWeight] | None = None,
        config_name: str = "config.json",
    ) -> None:
        """Read and check the header of every file; no weight is read.

        Args:
            source: The checkpoint, to be named in errors.
            weights: Name -> weight; None takes those of the safetensors files in the directory `source`.
            config_name: What tells which weights there should be.

        Raises:
            FileNotFoundError: There are no safetensors files, or the index names one that is not there.
            ValueError: A file is damaged, or the files and the index contradict each other.
        """
        self._source = source
        self._config_name = config_name
        self._weights: Mapping[str, StoredWeight] = (
            {name: SafetensorsWeight(stored) for name, stored in stored_tensors(source).items()}
            if weights is None
            else weights
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, file by file in the order of the data."""
        return tuple(self._weights)

    def spec(self, name: str) -> WeightSpec:
        """Type, shape and file of a tensor.

        Raises:
            ValueError: There is no such tensor.
        """
        return self._weight(name).spec

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor along its first axis, [stop - start, ...], in the stored type.

        Memory and time depend on the rows asked for alone.

        Raises:
            ValueError: There is no such tensor or row, its type is not one of `READABLE_DTYPES`, the file has
                become shorter, or a value is NaN or infinite.
        """
        weight = self._weight(name)
        spec = weight.spec
        if spec.dtype not in READABLE_DTYPES:
            raise ValueError(_unreadable(spec))
        if not spec.shape or not 0 <= start <= stop <= spec.shape[0]:
            raise ValueError(
                f"{spec.file}: rows {start} to {stop} of {spec.name!r}, whose shape is {list(spec.shape)}"
            )
        rows = weight.read_rows(start, stop)
        _require_finite(rows, spec, start)
        return rows

    def check(self, expected: Mapping[str, tuple[int, ...]], dropped: Collection[str] = ()) -> None:
        """Compare the checkpoint with what the model needs.

        Args:
            expected: Shape of every weight that the model reads.
            dropped: Names that may be present and are not read.

        Raises:
            ValueError: A weight is missing, not expected, of another shape or of an unreadable type.
        """
        config = self._config_name
        missing = [name for name in expected if name not in self._weights]
        if missing:
            raise ValueError(f"{self._source}: {_listed(missing, 'missing')}; {config} asks for them")
        unexpected = [name for name in self._weights if name not in expected and name not in dropped]
        if unexpected:
            file = self.spec(unexpected[0]).file
            raise ValueError(
                f"{file}: {_listed(unexpected, 'not expected')}; the model that {config} describes has no use for "
                f"them, so part of it is not implemented or {config} belongs to another model"
            )
        for name, shape in expected.items():
            spec = self.spec(name)
            if spec.shape != tuple(shape):
                raise ValueError(
                    f"{spec.file}: weight {spec.name!r} has shape {list(spec.shape)}, {config} says {list(shape)}"
                )
            if spec.dtype not in READABLE_DTYPES:
                raise ValueError(_unreadable(spec))

    def _weight(self, name: str) -> StoredWeight:
        if name not in self._weights:
            raise ValueError(f"{self._source}: no weight {name!r} among {len(self._weights)}")
        return self._weights[name]


def read_bytes(raw: NDArray[np.uint8], file: Path, offset: int, name: str) -> None:
    """Fill `raw` from the bytes of a file.

    Args:
        raw: Contiguous.
        file: The file.
        offset: First byte, counted from its start.
        name: The weight that they belong to.

    Raises:
        ValueError: The file ends before.
    """
    view = raw.data
    filled = 0
    with file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        # One call returns at most 2 GiB.
        while filled < len(view):
            count = stream.readinto(view[filled:])
            if not count:
                raise ValueError(
                    f"{file}: ends inside weight {name!r}; the file changed while it was being read"
                )
            filled += count


def _require_finite(rows: torch.Tensor, spec: WeightSpec, start: int) -> None:
    if not rows.numel():
        return
    # One pass without a temporary; a NaN anywhere becomes the minimum and the maximum.
    low, high = torch.aminmax(rows)
    if math.isfinite(low.item()) and math.isfinite(high.item()):
        return
    bad = int((~torch.isfinite(rows)).flatten().nonzero()[0])
    row = start + bad // (rows.numel() // rows.shape[0])
    raise ValueError(f"{spec.file}: weight {spec.name!r} holds {rows.flatten()[bad].item()} in row {row}")


def _unreadable(spec: WeightSpec) -> str:
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in READABLE_DTYPES)
    stored = str(spec.dtype).removeprefix("torch.")
    return f"{spec.file}: weight {spec.name!r} is stored as {stored}, expected one of {known}; give a float checkpoint"


def _listed(names: list[str], what: str, count: int = 5) -> str:
    some = ", ".join(names[:count]) + (", ..." if len(names) > count else "")
    return f"{len(names)} {'weight is' if len(names) == 1 else 'weights are'} {what}: {some}"
