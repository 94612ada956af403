"""The packed weights of a layer's experts, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.packed.packed_weight import PackedWeight, Storage


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Weights of one kind, shape and block size, of which a token's expert chooses one.

    Attributes:
        experts: The weight of each expert.
    """

    experts: tuple[PackedWeight, ...]

    def __post_init__(self) -> None:
        likes = {
            (one.kind, one.parts[0].block_size, one.in_features, one.out_features) for one in self.experts
        }
        assert len(likes) == 1, f"weights that cannot be stacked: {likes}"

    def storage(self) -> Storage:
        """The narrowest storage that is exact for every expert; reads what `PackedWeight.storage` does."""
        found = self.experts[0].storage()
        for expert in self.experts[1:]:
            # Nothing is wider.
            if "float32" in (found.format, found.scale_format):
                break
            if expert.storage() != found:
                wide = "float32" if found.scale_format else ""
                found = Storage("float32" if self.experts[0].kind == "float" else found.format, wide)
        return found

    def size(self, storage: Storage) -> int:
        """Bytes of all of them."""
        return len(self.experts) * self.experts[0].size(storage)

    def pieces(self, storage: Storage) -> Iterator[NDArray[np.uint8]]:
        """Their bytes in order."""
        for expert in self.experts:
            yield from expert.pieces(storage)
