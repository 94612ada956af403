"""The weights of a checkpoint as a stream: a few rows of one tensor at a time.

Rows are read into a buffer of their own instead of being mapped. Mapped pages count as the process's memory until
the kernel takes them back, so that copying a checkpoint through a mapping peaks at the size of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

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
    """What is known of a weight without reading it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightStream:
    """The weights of a checkpoint directory: their names and shapes at once, their values on request."""

    def __init__(self, directory: Path) -> None:
        """Read and check the header of every file; no weight is read.

        Raises:
            FileNotFoundError: There are no safetensors files, or the index names one that is not there.
            ValueError: A file is damaged, or the files and the index contradict each other.
        """
        self._directory = directory
        self._tensors = stored_tensors(directory)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, file by file in the order of the data."""
        return tuple(self._tensors)

    def spec(self, name: str) -> WeightSpec:
        """Type, shape and file of a tensor.

        Raises:
            ValueError: There is no such tensor.
        """
        stored = self._stored(name)
        return WeightSpec(name, TORCH_DTYPES[stored.dtype], stored.shape, stored.file)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of a tensor along its first axis, [stop - start, ...], in the stored type.

        Memory and time depend on the rows asked for alone.

        Raises:
            ValueError: There is no such tensor or row, its type is not one of `READABLE_DTYPES`, the file has
                become shorter, or a value is NaN or infinite.
        """
        spec, stored = self.spec(name), self._stored(name)
        if spec.dtype not in READABLE_DTYPES:
            raise ValueError(_unreadable(spec))
        if not spec.shape or not 0 <= start <= stop <= spec.shape[0]:
            raise ValueError(
                f"{spec.file}: rows {start} to {stop} of {name!r}, whose shape is {list(spec.shape)}"
            )
        shape = (stop - start, *spec.shape[1:])
        row_bytes = spec.nbytes // max(spec.shape[0], 1)
        raw = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        _read_into(raw, stored, start * row_bytes)
        rows = raw.view(spec.dtype).view(shape)
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
        missing = [name for name in expected if name not in self._tensors]
        if missing:
            raise ValueError(f"{self._directory}: {_listed(missing, 'missing')}; config.json asks for them")
        unexpected = [name for name in self._tensors if name not in expected and name not in dropped]
        if unexpected:
            file = self._tensors[unexpected[0]].file
            raise ValueError(
                f"{file}: {_listed(unexpected, 'not expected')}; the model that config.json describes has no use for "
                "them, so part of it is not implemented or config.json belongs to another model"
            )
        for name, shape in expected.items():
            spec = self.spec(name)
            if spec.shape != tuple(shape):
                raise ValueError(
                    f"{spec.file}: weight {name!r} has shape {list(spec.shape)}, config.json says {list(shape)}"
                )
            if spec.dtype not in READABLE_DTYPES:
                raise ValueError(_unreadable(spec))

    def _stored(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise ValueError(f"{self._directory}: no weight {name!r} among {len(self._tensors)}")
        return self._tensors[name]


def _read_into(raw: torch.Tensor, stored: StoredTensor, skip: int) -> None:
    """Fill `raw` from the bytes of a tensor, leaving out the first `skip`."""
    view = raw.numpy().data
    filled = 0
    with stored.file.open("rb", buffering=0) as file:
        file.seek(stored.offset + skip)
        # One call returns at most 2 GiB.
        while filled < len(view):
            count = file.readinto(view[filled:])
            if not count:
                raise ValueError(
                    f"{stored.file}: ends inside weight {stored.name!r}; the file changed while it was being read"
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
    return f"{len(names)} weights are {what}: {some}"
