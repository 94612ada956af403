"""The key/value buffers of a TensorRT session, in device memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvgraph.export.contract import StateTensor
from kvgraph.runtime.cuda import Cuda, DeviceBuffer
from kvgraph.runtime.element_types import element_type, to_float32
from kvgraph.runtime.session import Floats


class TrtCache:
    """Buffers of the capacity that the engine has built in; see `kvgraph.runtime.session.Cache`.

    An engine reads its cache up to the context in use, whatever the capacity, so the buffers need not grow.

    Attributes:
        owner: The session that made it.
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

    def reset(self) -> None:
        """Fill every buffer with zeros: a NaN behind a mask would still be a NaN."""
        for buffer in self._buffers.values():
            self._cuda.fill_zero(buffer)
        self._cuda.synchronize()

    def _nbytes(self, tensor: StateTensor) -> int:
        return math.prod(self.shape(tensor)) * element_type(tensor.dtype).carrier.itemsize
