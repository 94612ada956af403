"""The weights of a checkpoint as quantization sees them: float ones by name, and coded ones as they stand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from kvgraph.export.exporter import ExportedGraphs
from kvgraph.export.in_order import do_all
from kvgraph.export.parameter_rows import ParameterRows, cut_ranges
from kvgraph.export.weights_file import StoredTensor
from kvgraph.models.quantized.coded import CodedRows, CodedWeight
from kvgraph.models.sources import WeightSource
from kvgraph.models.weights import WeightStream
from kvgraph.quant.bundle_weights import NUMPY_TYPES
from kvgraph.quant.formats import FORMATS
from kvgraph.quant.linears import WEIGHT_SUFFIX, Linear
from kvgraph.quant.quantized_weight import QuantizedWeight
from kvgraph.quant.scheme import WeightScheme


class CheckpointWeights:
    """The parameters of a model as float tensors in the form that the graphs store; see `FloatWeights`.

    Several threads may read at a time, which is best done inside `one_thread`. No more is in memory than what is asked
    for, the last matrix that was asked for whole, and the tensor that `ParameterRows` keeps.

    Args:
        path: The checkpoint.
        stream: Its weights.
        graphs: What says which parameters there are, and what each is made from.
    """

    def __init__(self, path: Path, stream: WeightStream, graphs: ExportedGraphs) -> None:
        self.path = path
        self.tensors: Mapping[str, StoredTensor] = graphs.layout.tensors
        self._stacked = {
            name
            for name, source in graphs.traced.weights.sources.items()
            if len(graphs.layout.tensors[name].shape) > len(stream.spec(source.names[0]).shape)
        }
        self._rows = ParameterRows(stream, graphs.traced.weights.sources)
        self._last: tuple[str, NDArray[np.generic]] | None = None
        self._reading = Lock()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """See `FloatWeights.read`."""
        if stop is not None:
            return self._read(name, start, stop)
        with self._reading:
            if self._last is None or self._last[0] != name:
                self._last = None
                self._last = (name, self._read(name, 0, self.tensors[name].shape[0]))
            return self._last[1][start:]

    def read_columns(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """See `FloatWeights.read_columns`."""
        return self.read_expert(name, 0, start, stop)

    def read_expert(self, name: str, expert: int, start: int, stop: int) -> NDArray[np.generic]:
        """See `FloatWeights.read_expert`."""
        stored = self.tensors[name]
        return _elements(self._rows.columns(name, _type(stored), expert, start, stop), stored)

    def _read(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        stored = self.tensors[name]
        dtype = _type(stored)
        matrices, rows = (
            (range(start, stop), (0, stored.shape[1])) if name in self._stacked else ((0,), (start, stop))
        )
        step = self._rows.piece_rows(name, dtype)
        places = [
            (matrix, first, min(first + step, rows[1])) for matrix in matrices for first in range(*rows, step)
        ]
        if len(places) == 1:
            piece = _elements(self._rows.rows(name, dtype, *places[0]), stored)
            return piece.reshape(stop - start, *stored.shape[1:])
        values = np.empty((stop - start, *stored.shape[1:]), NUMPY_TYPES[stored.dtype])
        lines = values.reshape(len(matrices), rows[1] - rows[0], -1)

        def fill(place: tuple[int, int, int]) -> None:
            matrix, first, last = place
            piece = _elements(self._rows.rows(name, dtype, matrix, first, last), stored)
            lines[matrix - matrices[0], first - rows[0] : last - rows[0]] = piece.reshape(last - first, -1)

        do_all(fill, places)
        return values


class CheckpointCodes:
    """Weights that a checkpoint holds quantized; see `ReadyWeights`.

    The tensor that was read last is kept: its parts are asked for one after another.

    Args:
        coded: Checkpoint name -> weight.
        sources: Parameter -> what it is made from.
        schemes: Module -> how its weight is stored.
        dtype: The graphs' compute type.
    """

    def __init__(
        self,
        coded: Mapping[str, CodedWeight],
        sources: Mapping[str, WeightSource],
        schemes: Mapping[str, WeightScheme],
        dtype: str,
    ) -> None:
        self._coded = coded
        self._sources = sources
        self._schemes = schemes
        self._scale_dtype = NUMPY_TYPES[dtype]
        self._last: tuple[str, CodedRows] | None = None

    def read(self, linear: Linear, expert: int, start: int, stop: int) -> QuantizedWeight:
        """See `ReadyWeights.read`."""
        source = self._sources[linear.tensor]
        rows = self._rows(source.names[expert])
        taken = cut_ranges(source.ranges, start, stop) if source.ranges else [(start, stop)]
        scheme = self._schemes[linear.module]
        # Where there is one for each output, they have no blocks.
        block = slice(None) if scheme.block_size is not None else 0
        zero_point = None
        if rows.zero_point is not None:
            zero_point = _array(_columns(rows.zero_point, taken), scheme.format)[block]
        return QuantizedWeight(
            scheme,
            _array(_columns(rows.codes, taken), scheme.format),
            _columns(rows.scale.to(torch.float32), taken).numpy()[block],
            zero_point,
            None,
            self._scale_dtype,
        )

    def input_order(self, module: str) -> NDArray[np.int32] | None:
        """See `ReadyWeights.input_order`."""
        order = self._coded[self._sources[f"{module}{WEIGHT_SUFFIX}"].names[0]].order
        return None if order is None else order.to(torch.int32).numpy()

    def _rows(self, name: str) -> CodedRows:
        if self._last is None or self._last[0] != name:
            self._last = None
            coded = self._coded[name]
            outputs = coded.spec.shape[1 if coded.turned else 0]
            self._last = (name, coded.read(0, outputs))
        return self._last[1]


def _type(stored: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, stored.dtype)
    return dtype


def _elements(values: torch.Tensor, stored: StoredTensor) -> NDArray[np.generic]:
    """A tensor's memory as an array of the type that a parameter is stored in."""
    octets: NDArray[np.uint8] = values.reshape(-1).view(torch.uint8).numpy()
    return octets.view(NUMPY_TYPES[stored.dtype]).reshape(values.shape)


def _columns(rows: torch.Tensor, taken: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Some rows of [O, ...] as columns [..., O']."""
    return torch.cat([rows[start:stop] for start, stop in taken]).T


def _array(codes: torch.Tensor, form: str) -> NDArray[np.generic]:
    """Codes in the type of their format."""
    element = FORMATS[form].element
    if codes.dtype == torch.float8_e4m3fn:
        return codes.view(torch.uint8).numpy().view(element)
    return codes.numpy().astype(element)
