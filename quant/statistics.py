"""What calibration keeps of a layer's activations.

Everything that chooses scales works from three things: the largest and the mean magnitude of every channel over all
tokens, and some hundred tokens' values, drawn at random, the same for all of a layer's inputs. Ranges are exact where
they come from the first; searches measure errors on the last.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import present_key, present_value
from kvgraph.quant.formats import Floats
from kvgraph.quant.key_rotation import NO_PAIRS, find_rotary_pairs
from kvgraph.quant.layer_graph import Piece
from kvgraph.quant.layerwise import Batch

# Tokens whose activations are kept whole.
ROWS = 512
CACHE_ROLES = ("key", "value", "unrotated_key")
_CACHE_PARTS = ("low", "high", "mean", "length", "turned")


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Of the input [tokens, I] of some matrix products.

    Attributes:
        largest: [I], largest magnitude of every channel.
        mean: [I], mean magnitude of every channel.
        rows: [R, I], values of some tokens.
    """

    largest: Floats
    mean: Floats
    rows: Floats


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Of the keys or values [tokens, K, D] that a layer keeps.

    Attributes:
        low: [K, D], least value of every channel of every head.
        high: [K, D], largest.
        mean: [K, D].
        length: [K, D], largest magnitude, of a turned channel that of its pair: what it may reach at other positions.
        turned: [D], whether a rotary embedding turns the channel.
    """

    low: Floats
    high: Floats
    mean: Floats
    length: Floats
    turned: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Of one layer, or of the head.

    Attributes:
        inputs: Name of the value -> its statistics.
        cache: "key", "value" and, where the layer's piece gives them out, "unrotated_key" -> their statistics; empty
            for the head.
    """

    inputs: Mapping[str, InputStatistics]
    cache: Mapping[str, CacheStatistics]

    def save(self, path: Path) -> None:
        """Write them, complete or not at all."""
        arrays: dict[str, NDArray[Any]] = {}
        for role, kept in self.cache.items():
            arrays |= {f"{role}.{part}": getattr(kept, part) for part in _CACHE_PARTS}
        for index, entry in enumerate(self.inputs.values()):
            arrays[f"{index}.largest"], arrays[f"{index}.mean"] = entry.largest, entry.mean
            # Half the space; what is lost is less than any format that is searched for loses.
            arrays[f"{index}.rows"] = (entry.rows / _unit(entry.largest)).astype(np.float16)
        temporary = path.with_suffix(".tmp.npz")
        np.savez(temporary, **arrays)  # type: ignore[arg-type]  # NumPy's stub takes its keyword for an array name
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path, piece: Piece) -> LayerStatistics:
        """Read what `save` wrote for a piece."""
        with np.load(path, allow_pickle=False) as file:
            inputs = {}
            for index, name in enumerate(piece.product_inputs()):
                largest = file[f"{index}.largest"]
                rows = file[f"{index}.rows"].astype(np.float32) * _unit(largest)
                inputs[name] = InputStatistics(largest, file[f"{index}.mean"], rows)
            cache = {
                role: CacheStatistics(*(file[f"{role}.{part}"] for part in _CACHE_PARTS))
                for role in CACHE_ROLES
                if f"{role}.{_CACHE_PARTS[0]}" in file
            }
        return cls(inputs, cache)


def _unit(largest: Floats) -> Floats:
    return np.where(largest > 0, largest, np.float32(1))


class StatisticsCollector:
    """Gathers a piece's statistics batch by batch.

    Args:
        piece: Whose outputs it will see.
        tokens: How many tokens there will be in all.
        layer: Number of the layer, None for the head, which has no cache.
    """

    def __init__(self, piece: Piece, tokens: int, layer: int | None) -> None:
        self._where = piece.name
        self._pairs = NO_PAIRS if layer is None else find_rotary_pairs(piece)
        self._tokens = tokens
        self._cache_names = (
            {} if layer is None else {"key": present_key(layer), "value": present_value(layer)}
        )
        if piece.unrotated_keys is not None:
            self._cache_names["unrotated_key"] = piece.unrotated_keys
        chosen = np.random.default_rng(0).choice(tokens, min(ROWS, tokens), replace=False)
        self._chosen = np.sort(chosen)
        self._inputs = {name: _Extent() for name in piece.product_inputs()}
        self._cache = {role: _Extent() for role in self._cache_names}
        self._lengths: dict[str, Floats] = {}

    def visit(self, batch: Batch, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Take in a batch.

        Raises:
            ValueError: An activation is not finite.
        """
        last = batch.first_token + int(batch.lengths.sum())
        inside = (self._chosen >= batch.first_token) & (self._chosen < last)
        mine = self._chosen[inside] - batch.first_token
        for name, extent in self._inputs.items():
            rows = batch.rows(outputs[name])
            self._check(name, rows)
            extent.add(rows, np.abs(rows), mine)
        for role, extent in self._cache.items():
            entries = batch.cache_rows(outputs[self._cache_names[role]])
            self._check(role, entries)
            extent.add(entries, entries, mine[:0])
            lengths = self._pairs.lengths(entries) if role == "key" else np.abs(entries)
            self._lengths[role] = np.maximum(self._lengths.get(role, np.float32(0)), lengths.max(axis=0))

    def finish(self) -> LayerStatistics:
        """The statistics of everything seen."""
        inputs = {
            name: InputStatistics(
                np.maximum(extent.high, -extent.low), extent.mean(self._tokens), extent.kept()
            )
            for name, extent in self._inputs.items()
        }
        cache = {
            role: CacheStatistics(
                extent.low, extent.high, extent.mean(self._tokens), self._lengths[role], self._turned(role)
            )
            for role, extent in self._cache.items()
        }
        return LayerStatistics(inputs, cache)

    def _turned(self, role: str) -> NDArray[np.bool_]:
        turned = np.zeros(self._lengths[role].shape[-1], np.bool_)
        if role == "key":
            turned[self._pairs.first] = turned[self._pairs.second] = True
        return turned

    def _check(self, name: str, values: Floats) -> None:
        if not np.isfinite(values).all():
            raise ValueError(
                f"{self._where}: calibration makes {name!r} NaN or infinite; the weights or the data are broken, "
                "see kvgraph compare --layers"
            )


class _Extent:
    """Least and largest values, a sum and some rows of tensors [tokens, ...] that come in parts."""

    def __init__(self) -> None:
        self.low: Floats = np.array(np.inf, np.float32)
        self.high: Floats = np.array(-np.inf, np.float32)
        self._sum: NDArray[np.float64] = np.zeros(())
        self._rows: list[Floats] = []

    def add(self, values: Floats, summed: Floats, kept: NDArray[np.int64]) -> None:
        """Take in values, the same or others to sum, and keep those of some tokens."""
        self.low = np.minimum(self.low, values.min(axis=0))
        self.high = np.maximum(self.high, values.max(axis=0))
        self._sum = self._sum + summed.sum(axis=0, dtype=np.float64)
        self._rows.append(values[kept])

    def mean(self, tokens: int) -> Floats:
        """The sum over the number of tokens."""
        result: Floats = (self._sum / tokens).astype(np.float32)
        return result

    def kept(self) -> Floats:
        """The rows that were kept, in order."""
        return np.concatenate(self._rows)
