"""One graph bound to one cache: everything that a step needs and that stays the same from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import (
    INPUT_IDS,
    LOGIT_POSITIONS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    Contract,
    StateTensor,
    TensorSpec,
)
from kvgraph.runtime.checks import StepInputs
from kvgraph.runtime.element_types import element_type, to_float32
from kvgraph.runtime.ort_cache import OrtCache
from kvgraph.runtime.session import Floats


class Binding:
    """A graph's inputs and outputs, bound to a cache's buffers.

    The buffers are bound once, as `past_key_values.*` and (scatter form) as `present.*` too: ONNX Runtime copies the
    cache unless the two are one memory. The small inputs are bound anew at every step, which takes less than a
    microsecond each: on a GPU binding is what copies them to the device.

    A binding knows the addresses of the buffers and does not own them: the cache owns its bindings, and dies with the
    last reference to it.
    """

    def __init__(
        self,
        session: Any,
        contract: Contract,
        cache: OrtCache,
        device: tuple[str, int],
        hidden: tuple[TensorSpec, ...],
        *,
        decodes_by_prefill: bool = False,
    ) -> None:
        self._session = session
        self._io = session.io_binding()
        self._contract = contract
        self._device = device
        self._hidden_specs = hidden
        self._sizes = (0, 0)
        self._logits: Floats = np.empty(0, np.float32)
        self._hidden: list[NDArray[Any]] = []
        self._entries: list[tuple[StateTensor, NDArray[Any]]] = []
        for tensor in contract.state:
            self._bind_state(tensor, cache)
        if decodes_by_prefill:
            # Of one new token the only row.
            self._only_row = np.zeros((cache.batch_size, 1), np.int64)
            self._io.bind_cpu_input(LOGIT_POSITIONS, self._only_row)
        for name, value in cache.fixed_inputs.items():
            self._io.bind_ortvalue_input(name, value)

    def _bind_state(self, tensor: StateTensor, cache: OrtCache) -> None:
        place = (
            *self._device,
            element_type(tensor.dtype).onnx,
            cache.shape(tensor),
            cache.buffer(tensor.name).pointer,
        )
        self._io.bind_input(tensor.name, *place)
        if tensor.form == "scatter":
            self._io.bind_output(tensor.output, *place)

    def run(self, inputs: StepInputs, cache: OrtCache) -> Floats:
        """Logits [B, N, V] of one step over the bound cache; in decode the next step writes the same array again."""
        ids, positions = inputs.input_ids, inputs.logit_positions
        sizes = (ids.shape[1], 1 if positions is None else positions.shape[1])
        if sizes != self._sizes or positions is not None:
            self._bind_outputs(cache, *sizes)
        self._io.bind_cpu_input(INPUT_IDS, ids)
        self._io.bind_cpu_input(PAST_LENGTH, inputs.past_length)
        if positions is not None:
            self._io.bind_cpu_input(LOGIT_POSITIONS, positions)
        if inputs.new_length is not None:
            self._io.bind_cpu_input(NEW_LENGTH, inputs.new_length)
        self._session.run_with_iobinding(self._io)
        for tensor, entries in self._entries:
            cache.write(tensor, entries, inputs.past_length)
        return self._logits

    def hidden_states(self) -> tuple[Floats, ...]:
        """Copies of the latest step's residual stream, num_layers + 1 x [B, S, E]."""
        pairs = zip(self._hidden, self._hidden_specs, strict=True)
        return tuple(to_float32(array, spec.dtype) for array, spec in pairs)

    def _bind_outputs(self, cache: OrtCache, new_tokens: int, rows: int) -> None:
        batch = cache.batch_size
        self._logits = self._host_output(LOGITS, "float32", (batch, rows, self._contract.vocab_size))
        self._hidden = [
            self._host_output(spec.name, spec.dtype, (batch, new_tokens, int(spec.shape[2])))
            for spec in self._hidden_specs
        ]
        self._entries = []
        for tensor in self._contract.state:
            if tensor.form == "delta":
                _, heads, _, head_dim = cache.shape(tensor)
                entries = self._host_output(tensor.output, tensor.dtype, (batch, heads, new_tokens, head_dim))
                self._entries.append((tensor, entries))
        self._sizes = (new_tokens, rows)

    def _host_output(self, name: str, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array on the CPU that the graph's output `name` is written to."""
        kind = element_type(dtype)
        array = np.empty(shape, kind.carrier)
        self._io.bind_output(name, "cpu", 0, kind.onnx, shape, array.ctypes.data)
        return array
