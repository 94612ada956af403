"""The weights of a checkpoint as quantization sees them: float ones by name, and coded ones as they stand.

Both keep the tensor that was read last: its parts are asked for one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kvgraph.export.exporter import ExportedGraphs
from kvgraph.export.weight_bytes import as_bytes, one_thread, weight_pieces
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

    Args:
        path: The checkpoint.
        stream: Its weights.
        graphs: What says which parameters there are, and what each is made from.
    """

    def __init__(self, path: Path, stream: WeightStream, graphs: ExportedGraphs) -> None:
        self.path = path
        self.tensors: Mapping[str, StoredTensor] = graphs.layout.tensors
        self._stream = stream
        self._sources = graphs.traced.weights.sources
        self._last: tuple[str, NDArray[np.generic]] | None = None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[np.generic]:
        """See `FloatWeights.read`."""
        return self._whole(name)[start:stop]

    def read_columns(self, name: str, start: int, stop: int) -> NDArray[np.generic]:
        """See `FloatWeights.read_columns`."""
        return self._whole(name)[:, start:stop]

    def _whole(self, name: str) -> NDArray[np.generic]:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._read(self.tensors[name]))
        return self._last[1]

    def _read(self, stored: StoredTensor) -> NDArray[np.generic]:
        values = np.empty(stored.shape, NUMPY_TYPES[stored.dtype])
        octets, done = values.reshape(-1).view(np.uint8), 0
        dtype = getattr(torch, stored.dtype)
        with one_thread():
            for piece in as_bytes(
                weight_pieces(self._stream, stored.name, self._sources[stored.name], dtype)
            ):
                octets[done : done + piece.nbytes] = piece
                done += piece.nbytes
        assert done == octets.size
        return values


class CheckpointCodes:
    """Weights that a checkpoint holds quantized; see `ReadyWeights`.

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
        taken = list(_part(source.ranges, start, stop)) if source.ranges else [slice(start, stop)]
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


def _part(ranges: Iterable[tuple[int, int]], start: int, stop: int) -> Iterator[slice]:
    """Where entries `start` to `stop` of some ranges lie, which follow one another."""
    first = 0
    for low, high in ranges:
        begin, end = max(start - first, 0), min(stop - first, high - low)
        if begin < end:
            yield slice(low + begin, low + end)
        first += high - low


def _columns(rows: torch.Tensor, taken: Iterable[slice]) -> torch.Tensor:
    """Some rows of [O, ...] as columns [..., O']."""
    return torch.cat([rows[part] for part in taken]).T


def _array(codes: torch.Tensor, form: str) -> NDArray[np.generic]:
    """Codes in the type of their format."""
    element = FORMATS[form].element
    if codes.dtype == torch.float8_e4m3fn:
        return codes.view(torch.uint8).numpy().view(element)
    return codes.numpy().astype(element)
