"""Key/value buffers that ONNX Runtime reads and writes in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import GraphName, StateTensor
from kvgraph.runtime.cache_moves import overwrites_a_source, plan_moves
from kvgraph.runtime.element_types import element_type, to_float32
from kvgraph.runtime.session import Cache, Floats, Ids

if TYPE_CHECKING:
    from kvgraph.runtime.ort_binding import Binding

# Attention on the CPU costs by the capacity of the buffer, not by the tokens in use: start low, then double.
FIRST_CAPACITY = 64


class Buffer:
    """Zero-filled memory of one state tensor, on the CPU or on a GPU."""

    def __init__(self, content: NDArray[Any], device: str, device_id: int) -> None:
        import onnxruntime

        # On the CPU the value lies in the array's own memory; on a GPU it is a copy.
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy(content, device, device_id)
        self.array = content if device == "cpu" else None

    @property
    def pointer(self) -> int:
        """Address of the first element on its device."""
        return int(self._value.data_ptr())

    def read(self) -> NDArray[Any]:
        """The content; on the CPU the memory itself, not a copy."""
        if self.array is not None:
            return self.array
        content: NDArray[Any] = self._value.numpy()
        return content

    def write(self, content: NDArray[Any]) -> None:
        """Replace the content, at the same address."""
        if self.array is None:
            self._value.update_inplace(content)
        elif content is not self.array:
            self.array[...] = content


class OrtCache:
    """The buffers of one batch of sequences, see `kvgraph.runtime.session.Cache`.

    Where the graphs leave T symbolic, the buffers start at `FIRST_CAPACITY` slots and double up to `limit`;
    where T is written in, they have that many from the start.
    """

    def __init__(
        self,
        owner: object,
        state: Sequence[StateTensor],
        batch_size: int,
        limit: int,
        device: str,
        device_id: int,
    ) -> None:
        self.owner = owner
        # What the session has bound to these buffers; growing them makes it stale.
        self.bindings: dict[GraphName, Binding] = {}
        # Inputs that stay the same from step to step, as OrtValues: what an encoder made of the rows' sources.
        self.fixed_inputs: Mapping[str, Any] = {}
        self._state = {tensor.name: tensor for tensor in state}
        self._batch_size = batch_size
        self._limit = limit
        self._device = (device, device_id)
        fixed = next((tensor.capacity for tensor in state if tensor.capacity is not None), None)
        self._capacity = min(FIRST_CAPACITY, limit) if fixed is None else fixed
        self._buffers = {
            name: Buffer(self._zeros(tensor), device, device_id) for name, tensor in self._state.items()
        }

    @property
    def batch_size(self) -> int:
        """B, the rows of the cache."""
        return self._batch_size

    @property
    def capacity(self) -> int:
        """T, the slots that are allocated now."""
        return self._capacity

    @property
    def limit(self) -> int:
        """The most slots that this cache may ever have."""
        return self._limit

    def buffer(self, name: str) -> Buffer:
        """The memory of a state tensor, by its input name."""
        return self._buffers[name]

    def shape(self, tensor: StateTensor) -> tuple[int, int, int, int]:
        """[B, K, T, D] of a state tensor's buffer as it is now."""
        return (self._batch_size, int(tensor.shape[1]), self._capacity, int(tensor.shape[3]))

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots a row, keeping what is there.

        Raises:
            ValueError: `slots` is more than `limit`.
        """
        if slots > self._limit:
            raise ValueError(
                f"{slots} cache slots asked for, this cache may have {self._limit}; allocate one with a larger limit"
            )
        if slots <= self._capacity:
            return
        used = self._capacity
        self._capacity = min(self._limit, 1 << (slots - 1).bit_length())
        self.bindings.clear()
        # One tensor at a time, so that only one is there twice.
        for name, tensor in self._state.items():
            content = self._zeros(tensor)
            content[:, :, :used] = self._buffers[name].read()
            self._buffers[name] = Buffer(content, *self._device)

    def read(self, name: str) -> Floats:
        """A state tensor by its input name, as a float32 copy [B, K, T, D]; an INT8 cache gives its codes."""
        if name not in self._state:
            raise ValueError(f"state tensor {name!r} is unknown; the cache has {', '.join(self._state)}")
        return to_float32(self._buffers[name].read(), self._state[name].dtype)

    def gather_rows(self, source: Cache, rows: Ids, start: Ids, stop: Ids) -> None:
        """Take slots from rows of `source`, see `kvgraph.runtime.session.Cache.gather_rows`."""
        if not isinstance(source, OrtCache) or source.owner is not self.owner:
            raise ValueError("the cache belongs to another session; use this session's allocate_cache")
        moves = plan_moves(self, source, rows, start, stop)
        if not moves:
            return
        self.reserve(max(move.stop for move in moves))
        copied = source is self and overwrites_a_source(moves)
        for name, buffer in self._buffers.items():
            content = buffer.read()
            origin = content if source is self else source.buffer(name).read()
            strips = [origin[move.source, :, move.start : move.stop] for move in moves]
            for move, strip in zip(
                moves, [strip.copy() for strip in strips] if copied else strips, strict=True
            ):
                content[move.row, :, move.start : move.stop] = strip
            buffer.write(content)

    def reset(self) -> None:
        """Fill every buffer with zeros."""
        for name, tensor in self._state.items():
            buffer = self._buffers[name]
            if buffer.array is not None:
                buffer.array.fill(0)
            else:
                self._buffers[name] = Buffer(self._zeros(tensor), *self._device)
                self.bindings.clear()

    def set_fixed_inputs(self, values: Mapping[str, Any]) -> None:
        """Give the graphs these OrtValues, by the names of their inputs, at every step from now on."""
        self.fixed_inputs = values
        self.bindings.clear()

    def write(self, tensor: StateTensor, entries: NDArray[Any], past_length: NDArray[np.int64]) -> None:
        """Put new entries [B, K, S, D] at each row's `past_length`, which a graph in delta form leaves to us."""
        array = self._buffers[tensor.name].array
        assert array is not None, "delta caches are refused on GPUs when the session opens"
        stop = entries.shape[2]
        for row, start in enumerate(past_length.tolist()):
            array[row, :, start : start + stop] = entries[row]

    def _zeros(self, tensor: StateTensor) -> NDArray[Any]:
        return np.zeros(self.shape(tensor), element_type(tensor.dtype).carrier)
