"""A digest that tells checkpoints apart without reading all of their weights.

It covers small files whole. Of the weights it covers every file's name, size and header (what precedes its first
tensor) and, of every tensor, the first, middle and last `BLOCK_BYTES` (tensors of up to three blocks whole). A
retrained, converted or exchanged tensor changes it; an edit of a few values in the middle of a large tensor may not.
Hashing every weight would cost a second read of the checkpoint, and a bundle made from it is hashed in full anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

BLOCK_BYTES = 65_536


class Extent(Protocol):
    """Where a tensor lies, whatever the format of the file: its first byte and how many they are."""

    @property
    def file(self) -> Path:
        """The file."""

    @property
    def offset(self) -> int:
        """First byte, counted from the start of the file."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""


def sampled_digest(small_files: Iterable[Path], tensors: Iterable[Extent]) -> str:
    """SHA-256 over files and tensors, independent of folders and file times."""
    digest = hashlib.sha256()
    for part in _parts(small_files, tensors):
        # Each part after its length: no two sequences of parts give the same bytes.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(small_files: Iterable[Path], tensors: Iterable[Extent]) -> Iterator[bytes]:
    for file in small_files:
        yield file.name.encode()
        yield file.read_bytes()
    by_file: dict[Path, list[Extent]] = {}
    for tensor in tensors:
        by_file.setdefault(tensor.file, []).append(tensor)
    for file, stored in sorted(by_file.items()):
        yield file.name.encode()
        yield str(file.stat().st_size).encode()
        with file.open("rb") as stream:
            yield stream.read(min(tensor.offset for tensor in stored))
            for tensor in stored:
                for start, stop in sampled_ranges(tensor.nbytes):
                    stream.seek(tensor.offset + start)
                    yield stream.read(stop - start)


def sampled_ranges(nbytes: int) -> list[tuple[int, int]]:
    """Which bytes of a tensor the digest covers, as (start, stop)."""
    if nbytes <= 3 * BLOCK_BYTES:
        return [(0, nbytes)]
    middle = (nbytes - BLOCK_BYTES) // 2
    return [(0, BLOCK_BYTES), (middle, middle + BLOCK_BYTES), (nbytes - BLOCK_BYTES, nbytes)]
