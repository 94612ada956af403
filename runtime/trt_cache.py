"""The key/value buffers of a TensorRT session, in device memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvgraph.export.contract import StateTensor
from kvgraph.runtime.cache_moves import Move, overwrites_a_source, plan_moves
from kvgraph.runtime.cuda import Cuda, DeviceBuffer
from kvgraph.runtime.element_types import element_type, to_float32
from kvgraph.runtime.session import Cache, Floats, Ids


class TrtCache:
    """Buffers of the capacity that the engine has built in; see `kvgraph.runtime.session.Cache`.

    An engine reads its cache up to the context in use, whatever the capacity, so the buffers need not grow.

    Attributes:
        owner: The session that made it.
        attached: Inputs that stay from step to step, what an encoder made of the rows' sources: name -> shape, address.
        attachments: How often they were replaced.
    """

    def __init__(
        self,
        owner: object,
        cuda: Cuda,
        state: Sequence[StateTensor],
        batch_size: int,
        capacity: int,
        limit: int,
    ) -> None:
        self.owner = owner
        self.attached: Mapping[str, tuple[tuple[int, ...], int]] = {}
        self.attachments = 0
        # Whatever owns the memory of `attached`.
        self._held: object = None
        self._cuda = cuda
        self._batch_size, self._capacity, self._limit = batch_size, capacity, limit
        self._state = {tensor.name: tensor for tensor in state}
        self._buffers = {tensor.name: DeviceBuffer(cuda, self._nbytes(tensor)) for tensor in state}
        self.reset()

    @property
    def batch_size(self) -> int:
        """B, the rows of the cache."""
        return self._batch_size

    @property
    def capacity(self) -> int:
        """T, the slots that are allocated."""
        return self._capacity

    @property
    def limit(self) -> int:
        """The most slots that this cache may use."""
        return self._limit

    def shape(self, tensor: StateTensor) -> tuple[int, int, int, int]:
        """[B, K, T, D] of a state tensor's buffer."""
        return (self._batch_size, int(tensor.shape[1]), self._capacity, int(tensor.shape[3]))

    def address(self, name: str) -> int:
        """Where a state tensor's buffer starts, by its input name."""
        return self._buffers[name].address

    def attach(self, inputs: Mapping[str, tuple[tuple[int, ...], int]], owner: object) -> None:
        """Give the graphs these inputs at every step from now on; `owner` holds their memory."""
        # The stream may still read what was attached before.
        self._cuda.synchronize()
        self.attached, self._held = inputs, owner
        self.attachments += 1

    def write(self, tensor: StateTensor, entries: int, new_tokens: int, past_length: Ids) -> None:
        """Put new entries [B, K, S, D] at an address to each row's `past_length`, which delta form leaves to us."""
        _, heads, slots, head_dim = self.shape(tensor)
        slot_bytes = head_dim * element_type(tensor.dtype).carrier.itemsize
        for row, start in enumerate(past_length.tolist()):
            self._cuda.copy_strips(
                entries + row * heads * new_tokens * slot_bytes,
                self.address(tensor.name) + (row * heads * slots + start) * slot_bytes,
                strip_bytes=new_tokens * slot_bytes,
                stride_bytes=slots * slot_bytes,
                source_stride_bytes=new_tokens * slot_bytes,
                count=heads,
            )

    def reserve(self, slots: int) -> None:
        """Check that there is room for `slots` slots a row; all of them are allocated from the start.

        Raises:
            ValueError: `slots` is more than `limit`.
        """
        if slots > self._limit:
            raise ValueError(
                f"{slots} cache slots asked for, this cache may have {self._limit}; allocate one with a larger limit"
            )

    def read(self, name: str) -> Floats:
        """A state tensor by its input name, as a float32 copy [B, K, T, D].

        Raises:
            ValueError: There is no such tensor.
        """
        if name not in self._state:
            raise ValueError(f"state tensor {name!r} is unknown; the cache has {', '.join(self._state)}")
        tensor = self._state[name]
        carried = np.empty(self.shape(tensor), element_type(tensor.dtype).carrier)
        self._cuda.download(self._buffers[name].address, carried)
        self._cuda.synchronize()
        return to_float32(carried, tensor.dtype)

    def gather_rows(self, source: Cache, rows: Ids, start: Ids, stop: Ids) -> None:
        """Take slots from rows of `source`, on the device; see `kvgraph.runtime.session.Cache.gather_rows`.

        A move is one strided copy a tensor, queued on the session's stream: nothing waits.
        """
        if not isinstance(source, TrtCache) or source.owner is not self.owner:
            raise ValueError("the cache belongs to another session; use this session's allocate_cache")
        moves = plan_moves(self, source, rows, start, stop)
        if source is self and overwrites_a_source(moves):
            staged = TrtCache(
                self.owner, self._cuda, tuple(self._state.values()), len(moves), self._capacity, self._limit
            )
            outward = [replace(move, row=index) for index, move in enumerate(moves)]
            staged._copy(self, outward)
            self._copy(staged, [replace(move, source=index) for index, move in enumerate(moves)])
            # Its memory is freed when this returns.
            self._cuda.synchronize()
        else:
            self._copy(source, moves)

    def _copy(self, source: TrtCache, moves: Sequence[Move]) -> None:
        for name, tensor in self._state.items():
            _, heads, slots, _ = self.shape(tensor)
            row_bytes = self._nbytes(tensor) // self._batch_size
            slot_bytes = row_bytes // (heads * slots)
            for move in moves:
                first = move.start * slot_bytes
                self._cuda.copy_strips(
                    source.address(name) + move.source * row_bytes + first,
                    self.address(name) + move.row * row_bytes + first,
                    strip_bytes=(move.stop - move.start) * slot_bytes,
                    stride_bytes=slots * slot_bytes,
                    count=heads,
                )

    def reset(self) -> None:
        """Fill every buffer with zeros: a NaN behind a mask would still be a NaN."""
        for buffer in self._buffers.values():
            self._cuda.fill_zero(buffer)
        self._cuda.synchronize()

    def _nbytes(self, tensor: StateTensor) -> int:
        return math.prod(self.shape(tensor)) * element_type(tensor.dtype).carrier.itemsize
