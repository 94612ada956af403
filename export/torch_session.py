"""PyTorch behind the session protocol: the reference that compiled graphs are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvgraph.export.architecture import model_contract
from kvgraph.export.contract import Contract, past_key, past_value
from kvgraph.export.load_module import load_module
from kvgraph.models.checkpoint import Checkpoint
from kvgraph.models.decoder import Decoder
from kvgraph.models.encoder_decoder import KeyValue, Model
from kvgraph.runtime.cache_moves import plan_moves
from kvgraph.runtime.checks import check_step
from kvgraph.runtime.session import Cache, Floats, Ids, SessionInfo

# Logits, the new buffers of each layer, and the residual stream.
StepResult = tuple[Tensor, list[KeyValue], list[Tensor]]


class TorchCache:
    """Cache buffers as torch tensors; the whole limit is allocated at once."""

    def __init__(self, contract: Contract, dtype: torch.dtype, batch_size: int, limit: int) -> None:
        self.batch_size = batch_size
        self.limit = limit
        self.names = [tensor.name for tensor in contract.state]
        self.buffers = {
            tensor.name: torch.zeros(
                batch_size, int(tensor.shape[1]), limit, int(tensor.shape[3]), dtype=dtype
            )
            for tensor in contract.state
        }

    @property
    def capacity(self) -> int:
        """Slots of a row."""
        return self.limit

    def reserve(self, slots: int) -> None:
        """See `Cache.reserve`."""
        if slots > self.limit:
            raise ValueError(f"cache: {slots} slots are asked for, the limit is {self.limit}")

    def read(self, name: str) -> Floats:
        """See `Cache.read`."""
        return self.buffers[name].to(torch.float32).numpy().copy()

    def gather_rows(self, source: Cache, rows: Ids, start: Ids, stop: Ids) -> None:
        """See `Cache.gather_rows`."""
        if not isinstance(source, TorchCache):
            raise TypeError(f"cache is a {type(source).__name__}, expected one that this session allocated")
        moves = plan_moves(self, source, rows, start, stop)
        for name, buffer in self.buffers.items():
            strips = [source.buffers[name][move.source, :, move.start : move.stop].clone() for move in moves]
            for move, strip in zip(moves, strips, strict=True):
                buffer[move.row, :, move.start : move.stop] = strip

    def reset(self) -> None:
        """See `Cache.reset`."""
        for buffer in self.buffers.values():
            buffer.zero_()


class TorchSession:
    """A checkpoint in eager torch on the CPU."""

    def __init__(self, model: Model, source: str) -> None:
        """Run `model`, whose parameters are set; `source` is what it was read from."""
        self._model = model
        self._source = source
        self._hidden: tuple[Floats, ...] = ()
        self._dtype = model.precision.compute
        self._contract = model_contract(model)

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, dtype: str = "float32", residual_dtype: str | None = None
    ) -> TorchSession:
        """Load every weight of a decoder-only checkpoint.

        Raises:
            ValueError: The checkpoint is damaged or does not fit its config.
        """
        model = load_module(checkpoint, dtype, residual_dtype)
        assert isinstance(model, Decoder), "kvgraph.export.torch_encoder_session opens what has an encoder"
        return cls(model, checkpoint.source.name)

    @property
    def contract(self) -> Contract:
        """See `Session.contract`."""
        return self._contract

    @property
    def info(self) -> SessionInfo:
        """See `Session.info`."""
        dtype = str(self._dtype).removeprefix("torch.")
        return SessionInfo("torch", torch.__version__, "cpu", dtype, self._source)

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> TorchCache:
        """See `Session.allocate_cache`.

        Raises:
            ValueError: `batch_size` or `limit` is out of its range.
        """
        most = self._contract.max_positions
        limit = most if limit is None else limit
        if batch_size < 1 or not 1 <= limit <= most:
            raise ValueError(
                f"batch_size is {batch_size} and limit {limit}, expected 1 or more, and 1 to {most} positions"
            )
        return TorchCache(self._contract, self._dtype, batch_size, limit)

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        """See `Session.prefill`."""
        step = check_step(
            self._contract, cache.batch_size, cache.limit, input_ids, past_length, logit_positions, new_length
        )
        return self._run(cache, step.input_ids, step.past_length, step.logit_positions, step.new_length)

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        """See `Session.decode`."""
        step = check_step(self._contract, cache.batch_size, cache.limit, input_ids, past_length)
        return self._run(cache, step.input_ids, step.past_length, None, step.new_length)

    def hidden_states(self) -> tuple[Floats, ...]:
        """See `Session.hidden_states`; torch always has them."""
        if not self._hidden:
            raise RuntimeError("no step has been run yet")
        return self._hidden

    def _run(
        self, cache: Cache, input_ids: Ids, past_length: Ids, positions: Ids | None, new_length: Ids | None
    ) -> Floats:
        if not isinstance(cache, TorchCache):
            raise TypeError(f"cache is a {type(cache).__name__}, expected one that this session allocated")
        layers = range(self._contract.num_layers)
        past = [(cache.buffers[past_key(layer)], cache.buffers[past_value(layer)]) for layer in layers]
        with torch.no_grad():
            logits, presents, stream = self._step(
                cache,
                past,
                torch.from_numpy(input_ids),
                torch.from_numpy(past_length),
                _tensor(positions),
                _tensor(new_length),
            )
        for layer, (key, value) in enumerate(presents):
            cache.buffers[past_key(layer)], cache.buffers[past_value(layer)] = key, value
        self._hidden = tuple(hidden.to(torch.float32).numpy() for hidden in stream)
        result: Floats = logits.numpy()
        return result

    def _step(
        self,
        cache: TorchCache,
        past: Sequence[KeyValue],
        input_ids: Tensor,
        past_length: Tensor,
        positions: Tensor | None,
        new_length: Tensor | None,
    ) -> StepResult:
        """What the model makes of checked inputs."""
        result: StepResult = self._model(input_ids, past_length, past, positions, new_length)
        return result


def _tensor(array: Ids | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array))
