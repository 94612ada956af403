"""Which channels of a layer's keys its rotary embedding turns together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.contract import present_key
from kvgraph.quant.formats import Floats
from kvgraph.quant.layer_graph import Piece


@dataclass(frozen=True, slots=True)
class RotaryPairs:
    """The pairs of channels; the length of a pair is the same at all positions.

    Attributes:
        first: [R], one channel of each pair.
        second: [R], the other.
    """

    first: NDArray[np.intp]
    second: NDArray[np.intp]

    def lengths(self, keys: Floats) -> Floats:
        """Magnitudes of keys [..., D], those of turned channels replaced by their pair's length."""
        lengths = np.abs(keys)
        pairs = np.hypot(keys[..., self.first], keys[..., self.second])
        lengths[..., self.first] = lengths[..., self.second] = pairs
        return lengths


NO_PAIRS = RotaryPairs(np.arange(0), np.arange(0))


def find_rotary_pairs(piece: Piece) -> RotaryPairs:
    """The pairs of a layer's keys on their way into the cache; none where there is no rotary embedding."""
    values = ir.convenience.create_value_mapping(piece.graph)
    scatter = values[present_key(piece.layer)].producer()
    update = None if scatter is None or len(scatter.inputs) < 2 else scatter.inputs[1]
    node = None if update is None else update.producer()
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    if node is None or node.op_type != "RotaryEmbedding":
        return NO_PAIRS
    cos, interleaved = node.inputs[1], node.attributes.get("interleaved")
    assert cos is not None
    assert cos.shape is not None
    pairs = cos.shape[2]
    assert isinstance(pairs, int)
    if interleaved is not None and interleaved.as_int() == 1:
        return RotaryPairs(np.arange(pairs) * 2, np.arange(pairs) * 2 + 1)
    return RotaryPairs(np.arange(pairs), np.arange(pairs) + pairs)
