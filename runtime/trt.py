"""The two graphs of a bundle as TensorRT engines on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import (
    GRAPHS,
    INPUT_IDS,
    LOGIT_POSITIONS,
    NEW_LENGTH,
    PAST_LENGTH,
    Contract,
    GraphName,
)
from kvgraph.runtime.checks import StepInputs, check_step
from kvgraph.runtime.cuda import Cuda
from kvgraph.runtime.session import Cache, Floats, Ids, SessionInfo
from kvgraph.runtime.target import Limits, Target
from kvgraph.runtime.tensorrt_api import Runtime, TensorRT
from kvgraph.runtime.tensorrt_module import MessageLog, collect_messages, load_tensorrt
from kvgraph.runtime.trt_cache import TrtCache
from kvgraph.runtime.trt_context import LoadedEngine, load_engine
from kvgraph.runtime.trt_engine import EngineGraph

# Below it, a step costs the same whatever the context.
_SMALLEST_CONTEXT = 64


class TrtSession:
    """A TensorRT or TensorRT-RTX target of a bundle, see `kvgraph.runtime.session.Session`.

    A step reads the cache up to the context in use, rounded up to a power of two. Decode steps are captured in a CUDA
    graph, anew when that bucket, or the cache, is another than at the step before. Prompts longer than the engine's
    `prefill_chunk` are prefilled in chunks.

    Args:
        bundle: The bundle.
        target: Which of its targets, "tensorrt-rtx" or "tensorrt".
        device: Which GPU.
        trt: Stands in for the module in tests.
        cuda_runtime: Stands in for `cuda.bindings.runtime` in tests.

    Raises:
        FileNotFoundError: The bundle has no such target.
        ImportError: TensorRT or cuda-python is not installed.
        ValueError: The target was built from another bundle, for another version or another GPU.
        RuntimeError: There is no GPU, or the engine does not load.
    """

    def __init__(
        self,
        bundle: Bundle,
        target: str = "tensorrt-rtx",
        *,
        device: int = 0,
        trt: TensorRT | None = None,
        cuda_runtime: Any = None,
    ) -> None:
        self._target = Target.open(bundle, target)
        if self._target.limits is None:
            raise ValueError(f"{self._target.path}: not an engine, which this session runs")
        trt = trt or load_tensorrt(target)
        self._cuda = Cuda(device, cuda_runtime)
        again = bundle.build_command(target)
        self._target.check_runtime(trt.__version__, self._cuda.compute_capability, again)
        self._limits: Limits = self._target.limits
        log = collect_messages(trt)
        runtime = trt.Runtime(log)
        self._graphs = self._load(trt, runtime, log)
        # After the graphs, for attributes go in this order: an engine must not outlive its runtime.
        self._runtime = runtime
        self._info = SessionInfo(
            runtime=target,
            version=trt.__version__,
            device=f"cuda:{device}",
            dtype=self._target.contract.state[0].dtype,
            source=str(bundle.path),
            recipe=bundle.recipe_name,
            target=target,
        )

    def _load(self, trt: TensorRT, runtime: Runtime, log: MessageLog) -> dict[GraphName, EngineGraph]:
        """A context for each graph; an engine that serves both is loaded once."""
        engines: dict[str, LoadedEngine] = {}
        graphs: dict[GraphName, EngineGraph] = {}
        for name in GRAPHS:
            graph = self._target.graphs[name]
            if graph.file not in engines:
                engines[graph.file] = load_engine(trt, self._cuda, runtime, log, self._target, name)
            loaded = engines[graph.file]
            graphs[name] = EngineGraph(loaded, graph, self.contract, captured=name == "decode")
        return graphs

    @property
    def contract(self) -> Contract:
        """What the engines promise: the bundle's contract, with the capacity as a number."""
        return self._target.contract

    @property
    def info(self) -> SessionInfo:
        """What the session runs on."""
        return self._info

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> TrtCache:
        """A zero-filled cache for `batch_size` rows of at most `limit` slots (default: what the engine has).

        Raises:
            ValueError: `batch_size` or `limit` is out of the engine's range.
            RuntimeError: The device's memory is full.
        """
        most = self._limits.max_context
        limit = most if limit is None else limit
        if not 1 <= batch_size <= self._limits.max_batch:
            raise ValueError(
                f"batch_size is {batch_size}, the engine takes 1 to {self._limits.max_batch}; build with --max-batch"
            )
        if not 1 <= limit <= most:
            raise ValueError(
                f"limit is {limit}, the engine has 1 to {most} slots a row; build with --max-context"
            )
        return TrtCache(self, self._cuda, self.contract.state, batch_size, most, limit)

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        """Logits [B, N, V] of the tokens at `logit_positions`, see `kvgraph.runtime.session.Session.prefill`."""
        own, inputs = self._check(cache, input_ids, past_length, logit_positions, new_length)
        assert inputs.logit_positions is not None
        shape = (*inputs.logit_positions.shape, self.contract.vocab_size)
        logits = np.empty(shape, np.float32)
        for step, columns, wanted in _chunks(inputs, self._limits.prefill_chunk):
            result = self._run("prefill", own, step)
            logits[wanted] = result[wanted[:, columns]]
        return logits

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        """Logits [B, 1, V] after one token a row, in an array that the next call writes again."""
        own, inputs = self._check(cache, input_ids, past_length)
        return self._run("decode", own, inputs)

    def hidden_states(self) -> tuple[Floats, ...]:
        """Raise RuntimeError: an engine fuses the residual stream away."""
        raise RuntimeError("an engine has no hidden states; compare the bundle itself under ONNX Runtime")

    def _check(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids | None = None,
        new_length: Ids | None = None,
    ) -> tuple[TrtCache, StepInputs]:
        if not isinstance(cache, TrtCache) or cache.owner is not self:
            raise ValueError("the cache belongs to another session; use this session's allocate_cache")
        inputs = check_step(
            self.contract, cache.batch_size, cache.limit, input_ids, past_length, logit_positions, new_length
        )
        return cache, inputs

    def _run(self, name: GraphName, cache: TrtCache, inputs: StepInputs) -> Floats:
        graph = self._graphs[name]
        arrays = {INPUT_IDS: inputs.input_ids, PAST_LENGTH: inputs.past_length}
        if inputs.new_length is not None:
            arrays[NEW_LENGTH] = inputs.new_length
        if LOGIT_POSITIONS in graph.input_names:
            # An engine that was made from prefill.onnx is asked for the one row that decode has.
            zeros = np.zeros((cache.batch_size, 1), np.int64)
            arrays[LOGIT_POSITIONS] = zeros if inputs.logit_positions is None else inputs.logit_positions
        used = int(inputs.past_length.max()) + inputs.input_ids.shape[1]
        return graph.run(cache, arrays, context_bucket(used, cache.capacity))


def context_bucket(used: int, capacity: int) -> int:
    """How many slots a step reads: those in use rounded up to a power of two, at least 64, at most all."""
    return min(capacity, max(_SMALLEST_CONTEXT, 1 << (used - 1).bit_length()))


def _chunks(
    inputs: StepInputs, chunk: int
) -> Iterator[tuple[StepInputs, NDArray[np.int64], NDArray[np.bool_]]]:
    """Cut a prefill into calls of at most `chunk` new tokens and `chunk` rows of logits.

    Yields:
        The inputs of a call; the columns of `logit_positions` that it answers; and which of [B, N] it really answers:
        a column may name tokens of different chunks in different rows.
    """
    positions = inputs.logit_positions
    assert positions is not None
    for start in range(0, inputs.input_ids.shape[1], chunk):
        ids = np.ascontiguousarray(inputs.input_ids[:, start : start + chunk])
        here = (positions >= start) & (positions < start + ids.shape[1])
        asked = np.flatnonzero(here.any(axis=0))
        # A chunk that nobody asks about is run for its cache, with one row of logits that is dropped.
        for first in range(0, max(1, asked.size), chunk):
            columns = asked[first : first + chunk] if asked.size else np.zeros(1, np.int64)
            wanted = np.zeros_like(here)
            wanted[:, columns] = here[:, columns]
            local = np.clip(positions[:, columns] - start, 0, ids.shape[1] - 1)
            # The total length of a row is that of the whole prompt at every chunk.
            left = None if inputs.new_length is None else inputs.new_length - start
            yield (
                StepInputs(ids, inputs.past_length + start, np.ascontiguousarray(local), left),
                columns,
                wanted,
            )
