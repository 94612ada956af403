"""The tensors that make up coded weights: found by their names, read by rows, and checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvgraph.models.safetensors_file import StoredTensor
from kvgraph.models.weights import TORCH_DTYPES, SafetensorsWeight

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class ModuleTensors:
    """The tensors of one module by the last part of their names; those asked for are remembered as known."""

    def __init__(self, module: str, tensors: Mapping[str, StoredTensor]) -> None:
        """Take the tensors of `module`, suffix -> tensor."""
        self.module = module
        self._tensors = tensors
        self.known: set[str] = set()

    def has(self, suffix: str) -> bool:
        """Whether there is such a tensor."""
        return suffix in self._tensors

    def stored(self, suffix: str) -> StoredTensor | None:
        """A tensor as it lies in the file, None where it is missing; looking at it does not make it known."""
        return self._tensors.get(suffix)

    @property
    def file(self) -> Path:
        """A file that holds one of them, to be named in errors."""
        return next(iter(self._tensors.values())).file

    def error(self, message: str) -> ValueError:
        """The error to raise about this module."""
        return ValueError(f"{self.file}: {self.module}: {message}")

    def find(
        self, suffix: str, dtypes: Collection[torch.dtype], shapes: Collection[tuple[int, ...]] = ()
    ) -> SafetensorsWeight:
        """A tensor of one of some types and shapes; no shapes allow any.

        Raises:
            ValueError: It is missing, or another than that.
        """
        if suffix not in self._tensors:
            raise self.error(f"{suffix} is missing; there are {', '.join(sorted(self._tensors))}")
        self.known.add(suffix)
        stored = self._tensors[suffix]
        if TORCH_DTYPES[stored.dtype] not in dtypes:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.error(f"{suffix} is stored as {stored.dtype}, expected {expected}")
        if shapes and stored.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise self.error(f"{suffix} has shape {list(stored.shape)}, expected {expected}")
        return SafetensorsWeight(stored)

    def scalar(self, suffix: str) -> float:
        """The value of a scale that stands alone.

        Raises:
            ValueError: It is missing, has several entries, or is not a positive number.
        """
        scale = read_whole(self.find(suffix, SCALE_DTYPES, ((), (1,)))).reshape(1, 1)
        require_scales(scale, f"{self.file}: {self.module}.{suffix}")
        return float(scale)


def group_by_module(tensors: Mapping[str, StoredTensor]) -> dict[str, dict[str, StoredTensor]]:
    """Module -> suffix -> tensor: "model.norm.weight" is "weight" of "model.norm"."""
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = stored
    return modules


def read_whole(weight: SafetensorsWeight) -> Tensor:
    """All of a tensor, in its shape and type; one without dimensions, too."""
    shape = weight.spec.shape
    if shape:
        return weight.read_rows(0, shape[0])
    stored = weight.stored
    one = StoredTensor(stored.name, stored.dtype, (1,), stored.offset, stored.nbytes, stored.file)
    return SafetensorsWeight(one).read_rows(0, 1).reshape(())


def require_scales(scale: Tensor, name: str) -> None:
    """Refuse scales that are not positive numbers.

    Args:
        scale: [O', G], or [G, O'].
        name: What they are, to be named in the error.
    """
    values = scale.to(torch.float32)
    usable = torch.isfinite(values) & (values > 0)
    if not usable.all():
        row, column = (int(index) for index in (~usable).nonzero()[0])
        raise ValueError(
            f"{name} holds {float(values[row, column])} at [{row}, {column}], expected positive numbers; the "
            "checkpoint is damaged"
        )


def require_numbers(codes: Tensor, name: str) -> None:
    """Refuse 8-bit float codes that are no numbers.

    Args:
        codes: float8_e4m3fn.
        name: What they are, to be named in the error.
    """
    # The format has no infinity: all bits but the sign's set is its only NaN.
    if bool((codes.view(torch.uint8) & 0x7F == 0x7F).any()):
        raise ValueError(f"{name} holds a NaN; the checkpoint is damaged")


def unpack_bytes(packed: Tensor, bits: int) -> Tensor:
    """The unsigned numbers that the bytes along the last axis hold, lowest bits first: [..., n] -> [..., n * 8 / bits].

    Words of 32 bits whose numbers begin with the lowest bits are such bytes, too.
    """
    if bits == 8:
        return packed
    halves = torch.stack((packed & 0x0F, packed >> 4), dim=-1)
    return halves.reshape(*packed.shape[:-1], -1)
