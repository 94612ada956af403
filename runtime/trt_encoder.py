"""The three graphs of an encoder-decoder bundle as TensorRT engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvgraph.export.contract import (
    ENCODE,
    ENCODER_LENGTH,
    INPUT_IDS,
    SOURCE_TOKENS,
    EncoderContract,
    GraphName,
    TensorSpec,
)
from kvgraph.runtime.checks import StepInputs, check_source, check_source_of_row
from kvgraph.runtime.cuda import Cuda, DeviceBuffer
from kvgraph.runtime.element_types import element_type, to_float32
from kvgraph.runtime.encoder_session import Encoded
from kvgraph.runtime.session import Cache, Floats, Ids
from kvgraph.runtime.target import TargetGraph
from kvgraph.runtime.tensorrt_api import Runtime, TensorRT
from kvgraph.runtime.tensorrt_module import MessageLog
from kvgraph.runtime.trt import TrtSession
from kvgraph.runtime.trt_cache import TrtCache
from kvgraph.runtime.trt_context import EngineContext, LoadedEngine, load_engine
from kvgraph.runtime.trt_engine import EngineGraph


@dataclass(frozen=True, slots=True)
class TrtEncoded:
    """Sources as the decoder reads them, in device memory; see `kvgraph.runtime.encoder_session.Encoded`.

    Attributes:
        owner: The session that made it.
        cuda: Its device.
        tensors: Cross tensor -> its dtype and shape.
        buffers: Cross tensor -> its memory, [N, K, C, D].
        lengths: Memory of `encoder_length`.
        encoder_length: [N] int64.
    """

    owner: object
    cuda: Cuda
    tensors: Mapping[str, TensorSpec]
    buffers: Mapping[str, DeviceBuffer]
    lengths: DeviceBuffer
    encoder_length: Ids

    @property
    def num_sources(self) -> int:
        """N, how many there are."""
        return len(self.encoder_length)

    def shape(self, name: str) -> tuple[int, ...]:
        """[N, K, C, D] of a cross tensor."""
        return tuple(int(dim) for dim in self.tensors[name].shape)

    def read(self, name: str) -> Floats:
        """See `Encoded.read`."""
        if name not in self.tensors:
            raise ValueError(f"cross tensor {name!r} is unknown; there are {', '.join(self.tensors)}")
        dtype = self.tensors[name].dtype
        carried = np.empty(self.shape(name), element_type(dtype).carrier)
        self.cuda.download(self.buffers[name].address, carried)
        self.cuda.synchronize()
        return to_float32(carried, dtype)

    def inputs(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """What the decoder's graphs take: name -> shape, address."""
        found: dict[str, tuple[tuple[int, ...], int]] = {
            name: (self.shape(name), buffer.address) for name, buffer in self.buffers.items()
        }
        return {ENCODER_LENGTH: (self.encoder_length.shape, self.lengths.address), **found}

    def rows(self, source_of_row: Ids) -> TrtEncoded:
        """Copies of the sources that rows read, one a row."""
        made = new_encoded(self.owner, self.cuda, self.tensors.values(), self.encoder_length[source_of_row])
        for name, buffer in self.buffers.items():
            row_bytes = buffer.nbytes // self.num_sources
            for row, source in enumerate(source_of_row.tolist()):
                self.cuda.copy_strips(
                    buffer.address + source * row_bytes,
                    made.buffers[name].address + row * row_bytes,
                    strip_bytes=row_bytes,
                    stride_bytes=row_bytes,
                    count=1,
                )
        # The sources may be freed when this returns.
        self.cuda.synchronize()
        return made


def new_encoded(owner: object, cuda: Cuda, tensors: Iterable[TensorSpec], encoder_length: Ids) -> TrtEncoded:
    """Memory for as many sources as there are lengths; of the tensors' shapes the first dimension is left open."""
    shaped = {
        tensor.name: replace(tensor, shape=(len(encoder_length), *tensor.shape[1:])) for tensor in tensors
    }
    buffers = {
        name: DeviceBuffer(
            cuda, math.prod(int(dim) for dim in tensor.shape) * element_type(tensor.dtype).carrier.itemsize
        )
        for name, tensor in shaped.items()
    }
    lengths = DeviceBuffer(cuda, encoder_length.nbytes)
    cuda.upload(encoder_length, lengths.address)
    cuda.synchronize()
    return TrtEncoded(owner, cuda, shaped, buffers, lengths, encoder_length)


class EncodeGraph:
    """The encoder's engine; its shapes change with every call, so nothing is captured. Arguments: see `EngineGraph`."""

    def __init__(self, loaded: LoadedEngine, graph: TargetGraph) -> None:
        self._context = EngineContext(loaded, graph, (), captured=False)

    def run(self, input_ids: Ids, encoded: TrtEncoded) -> None:
        """Fill the memory of sources [N, C], whose lengths are the memory's.

        Raises:
            RuntimeError: TensorRT or CUDA fails.
        """
        inputs = {INPUT_IDS: input_ids, ENCODER_LENGTH: encoded.encoder_length}
        self._context.bind_small(self._context.shapes(inputs))
        for name, buffer in encoded.buffers.items():
            self._context.bind_address(name, buffer.address)
        self._context.finish_binding()
        self._context.upload(inputs)
        self._context.execute()


class TrtEncoderSession(TrtSession):
    """A TensorRT target of an encoder-decoder bundle, see `kvgraph.runtime.encoder_session.EncoderSession`.

    What the encoder gives stays in device memory and is bound where it lies. Arguments: see `TrtSession`.
    """

    _encode: EncodeGraph

    def encode(self, input_ids: Ids, encoder_length: Ids) -> TrtEncoded:
        """What the decoder reads of each source, see `EncoderSession.encode`.

        Raises:
            ValueError: There are more sources, or longer ones, than the engine takes.
        """
        source = check_source(self._encoder, input_ids, encoder_length)
        num_sources, tokens = source.input_ids.shape
        if num_sources > self._limits.max_batch:
            raise ValueError(
                f"there are {num_sources} sources, the engine takes 1 to {self._limits.max_batch} at once; build with "
                "--max-batch"
            )
        tensors = [
            replace(tensor, shape=tuple(tokens if dim == SOURCE_TOKENS else dim for dim in tensor.shape))
            for tensor in self._encoder.cross
        ]
        encoded = new_encoded(self, self._cuda, tensors, source.encoder_length.copy())
        self._encode.run(source.input_ids, encoded)
        self._cuda.synchronize()
        return encoded

    def attach(self, cache: Cache, encoded: Encoded, source_of_row: Ids | None = None) -> None:
        """Let the rows of a cache read sources, see `EncoderSession.attach`; rows that share one get copies."""
        if not isinstance(cache, TrtCache) or cache.owner is not self:
            raise ValueError("the cache belongs to another session; use this session's allocate_cache")
        if not isinstance(encoded, TrtEncoded) or encoded.owner is not self:
            raise ValueError("the sources were encoded by another session; use this session's encode")
        rows = check_source_of_row(source_of_row, encoded.num_sources, cache.batch_size)
        own = np.array_equal(rows, np.arange(encoded.num_sources))
        taken = encoded if own else encoded.rows(rows)
        cache.attach(taken.inputs(), taken)

    @property
    def _encoder(self) -> EncoderContract:
        assert self.contract.encoder is not None, "a decoder-only target is run by TrtSession"
        return self.contract.encoder

    def _load(self, trt: TensorRT, runtime: Runtime, log: MessageLog) -> dict[GraphName, EngineGraph]:
        loaded = load_engine(trt, self._cuda, runtime, log, self._target, ENCODE)
        self._encode = EncodeGraph(loaded, self._target.graphs[ENCODE])
        return super()._load(trt, runtime, log)

    def _run(self, name: GraphName, cache: TrtCache, inputs: StepInputs) -> Floats:
        if not cache.attached:
            raise ValueError("the cache's rows have no sources; call encode, then attach")
        return super()._run(name, cache, inputs)
