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
from kvgraph.quant.layer_graph import Piece
from kvgraph.quant.layerwise import Batch

# Tokens whose activations are kept whole.
ROWS = 512


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
class LayerStatistics:
    """Of one layer, or of the head.

    Attributes:
        inputs: Name of the value -> its statistics.
        cache: "key" and "value" -> [K, D], largest magnitude of every channel of every head; empty for the head.
    """

    inputs: Mapping[str, InputStatistics]
    cache: Mapping[str, Floats]

    def save(self, path: Path) -> None:
        """Write them, complete or not at all."""
        arrays: dict[str, NDArray[Any]] = {f"cache.{role}": value for role, value in self.cache.items()}
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
            cache = {role: file[f"cache.{role}"] for role in ("key", "value") if f"cache.{role}" in file}
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
        self._names = list(piece.product_inputs())
        self._where = piece.name
        self._tokens = tokens
        self._cache_names = (
            {} if layer is None else {"key": present_key(layer), "value": present_value(layer)}
        )
        chosen = np.random.default_rng(0).choice(tokens, min(ROWS, tokens), replace=False)
        self._chosen = np.sort(chosen)
        self._largest: dict[str, Floats] = {}
        self._sum: dict[str, NDArray[np.float64]] = {}
        self._rows: dict[str, list[Floats]] = {name: [] for name in self._names}

    def visit(self, batch: Batch, outputs: Mapping[str, NDArray[Any]]) -> None:
        """Take in a batch.

        Raises:
            ValueError: An activation is not finite.
        """
        for name in self._names:
            rows = batch.rows(outputs[name])
            magnitudes = np.abs(rows)
            self._raise_to(name, magnitudes)
            self._sum[name] = self._sum.get(name, 0) + magnitudes.sum(axis=0, dtype=np.float64)
            last = batch.first_token + int(batch.lengths.sum())
            mine = self._chosen[(self._chosen >= batch.first_token) & (self._chosen < last)]
            self._rows[name].append(rows[mine - batch.first_token])
        for role, name in self._cache_names.items():
            self._raise_to(role, np.abs(batch.cache_rows(outputs[name])))

    def finish(self) -> LayerStatistics:
        """The statistics of everything seen."""
        inputs = {
            name: InputStatistics(
                self._largest[name],
                (self._sum[name] / self._tokens).astype(np.float32),
                np.concatenate(self._rows[name]),
            )
            for name in self._names
        }
        return LayerStatistics(inputs, {role: self._largest[role] for role in self._cache_names})

    def _raise_to(self, name: str, magnitudes: Floats) -> None:
        largest = magnitudes.max(axis=0)
        if not np.isfinite(largest).all():
            raise ValueError(
                f"{self._where}: calibration makes {name!r} NaN or infinite; the weights or the data are broken, "
                "see kvgraph compare --layers"
            )
        self._largest[name] = np.maximum(self._largest.get(name, np.float32(0)), largest)
