"""Prefill or decode of a TensorRT target: an engine's context, bound to a cache and to what its rows read."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping

import numpy as np

from kvgraph.export.contract import (
    CONTEXT_LENGTH,
    INPUT_IDS,
    LOGIT_POSITIONS,
    LOGITS,
    PAST_LENGTH,
    Contract,
)
from kvgraph.runtime.cuda import DeviceBuffer, pinned_array
from kvgraph.runtime.element_types import element_type
from kvgraph.runtime.session import Floats, Ids
from kvgraph.runtime.target import TargetGraph
from kvgraph.runtime.trt_cache import TrtCache
from kvgraph.runtime.trt_context import EngineContext, LoadedEngine


class EngineGraph:
    """One of the two graphs that every target has.

    The cache is bound once as `past_key_values.*` and, in scatter form, as `present.*`, one address for both: the
    engine updates it in place. In delta form the engine gives the new entries, which are copied into the cache behind
    the step, two copies for each layer and row: their places change from step to step, which a captured graph cannot
    follow. What the rows read of sources is bound where it lies. TensorRT is told shapes and addresses only when they
    change.

    Args:
        loaded: The engine.
        graph: Its entry in target.json.
        contract: The target's contract.
        captured: See `EngineContext`.

    Raises:
        RuntimeError: There is no context for the profile, as where the device's memory is full.
    """

    def __init__(
        self, loaded: LoadedEngine, graph: TargetGraph, contract: Contract, *, captured: bool
    ) -> None:
        self._cuda, self._contract = loaded.cuda, contract
        large = {CONTEXT_LENGTH, *(tensor.name for tensor in contract.state)}
        if contract.encoder is not None:
            large |= {contract.encoder.length.name, *(tensor.name for tensor in contract.encoder.cross)}
        self._context = EngineContext(loaded, graph, large, captured=captured)
        # A shape input is read from host memory, when work is queued.
        self._context_length = np.zeros(1, np.int64) if CONTEXT_LENGTH in graph.shapes else None
        # New entries of caches in delta form, by the name of the output.
        self._entries: dict[str, DeviceBuffer] = {}
        self._device_logits: DeviceBuffer | None = None
        self._logits: Floats | None = None
        self._bound: tuple[weakref.ref[TrtCache], int, dict[str, tuple[int, ...]], int] | None = None

    @property
    def input_names(self) -> frozenset[str]:
        """The small inputs that `run` has to be given."""
        return self._context.input_names

    def run(self, cache: TrtCache, inputs: Mapping[str, Ids], context_length: int) -> Floats:
        """Logits [B, N, V] of one step, in an array that the next step may write again.

        Args:
            cache: Read and updated in place.
            inputs: Name -> contiguous int64 array, for every name of `input_names`.
            context_length: Slots that attention reads, at least those in use.

        Raises:
            RuntimeError: TensorRT or CUDA fails.
        """
        shapes = self._context.shapes(inputs)
        bound = self._bound
        if (
            bound is None
            or bound[0]() is not cache
            or bound[1:] != (cache.attachments, shapes, context_length)
        ):
            self._bind(cache, shapes, context_length)
        self._context.upload(inputs)
        self._context.execute()
        for tensor in self._contract.state:
            if tensor.form == "delta":
                cache.write(tensor, self._entries[tensor.output].address, *_spans(inputs))
        assert self._device_logits is not None  # _bind made both
        assert self._logits is not None
        self._cuda.download(self._device_logits.address, self._logits)
        self._cuda.synchronize()
        return self._logits

    def _bind(self, cache: TrtCache, shapes: dict[str, tuple[int, ...]], context_length: int) -> None:
        """Tell TensorRT the shapes and addresses of a step."""
        self._bound = None
        self._context.bind_small(shapes)
        for tensor in self._contract.state:
            self._context.bind_input(tensor.name, cache.shape(tensor), cache.address(tensor.name))
            if tensor.form == "scatter":
                self._context.bind_address(tensor.output, cache.address(tensor.name))
        for name, (shape, address) in cache.attached.items():
            self._context.bind_input(name, shape, address)
        if self._context_length is not None:
            self._context_length[0] = context_length
            self._context.bind_input(CONTEXT_LENGTH, (1,), self._context_length.ctypes.data)
        self._bind_outputs(cache, shapes)
        self._context.finish_binding()
        self._bound = (weakref.ref(cache), cache.attachments, shapes, context_length)

    def _bind_outputs(self, cache: TrtCache, shapes: Mapping[str, tuple[int, ...]]) -> None:
        batch_size, new_tokens = shapes[INPUT_IDS]
        for tensor in self._contract.state:
            if tensor.form == "delta":
                _, heads, _, head_dim = cache.shape(tensor)
                item = element_type(tensor.dtype).carrier.itemsize
                buffer = DeviceBuffer(self._cuda, math.prod((batch_size, heads, new_tokens, head_dim, item)))
                self._entries[tensor.output] = buffer
                self._context.bind_address(tensor.output, buffer.address)
        logits_shape = (batch_size, shapes.get(LOGIT_POSITIONS, (0, 1))[1], self._contract.vocab_size)
        if self._logits is None or self._logits.shape != logits_shape:
            self._logits = pinned_array(self._cuda, logits_shape, np.float32)
            self._device_logits = DeviceBuffer(self._cuda, self._logits.nbytes)
        assert self._device_logits is not None
        self._context.bind_address(LOGITS, self._device_logits.address)


def _spans(inputs: Mapping[str, Ids]) -> tuple[int, Ids]:
    """How many new tokens each row gets, and where they begin."""
    return inputs[INPUT_IDS].shape[1], inputs[PAST_LENGTH]
