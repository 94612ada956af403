"""What every runtime offers: a `Session` that runs the two graphs over a `Cache`.

A session is stateless between calls: everything that a sequence has accumulated is in its cache, so that two
sequences can be interleaved over one session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import Contract

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What a session really runs on; printed in every report.

    Attributes:
        runtime: "onnxruntime", "tensorrt", "tensorrt-rtx" or "torch".
        version: Version of that runtime.
        device: "cpu" or "cuda:0", as the runtime itself reports it.
        dtype: Element type of the cache.
        source: The bundle or checkpoint that was loaded.
        kernels: Instruction set of kvgraph's own operators, such as "avx2"; None where the graphs have none of them.
        recipe: How the bundle is quantized; None for float weights.
        target: What `kvgraph build` made of the bundle; None for its own graphs, and for a checkpoint.
    """

    runtime: str
    version: str
    device: str
    dtype: str
    source: str
    kernels: str | None = None
    recipe: str | None = None
    target: str | None = None

    @property
    def subject(self) -> str:
        """What was loaded: the bundle with its recipe and its target, or the checkpoint."""
        recipe = "" if self.recipe is None else f" ({self.recipe})"
        return f"{self.source}{recipe}" + ("" if self.target is None else f", target {self.target}")

    @property
    def title(self) -> str:
        """The runtime, the device and the cache in one line."""
        own = "" if self.kernels is None else f", {self.kernels} kernels"
        return f"{self.runtime} {self.version} on {self.device}{own}, {self.dtype} cache"


class Cache(Protocol):
    """The key/value buffers of a batch of sequences."""

    @property
    def batch_size(self) -> int:
        """B, the rows of the cache."""
        ...

    @property
    def capacity(self) -> int:
        """T, the slots that are allocated now."""
        ...

    @property
    def limit(self) -> int:
        """The most slots that this cache may ever have."""
        ...

    def reserve(self, slots: int) -> None:
        """Make room for `slots` slots a row, keeping what is there.

        Raises:
            ValueError: `slots` is more than `limit`.
        """
        ...

    def read(self, name: str) -> Floats:
        """A state tensor by its input name, as a float32 copy [B, K, T, D]."""
        ...

    def gather_rows(self, source: Cache, rows: Ids, start: Ids, stop: Ids) -> None:
        """Take slots from rows of `source`, as if all were read before one is written; the other slots stay.

        Args:
            source: This cache, or another one of the same session.
            rows: [B] int64, the row of `source` that each row takes from; its own in this cache changes nothing.
            start: [B] int64, the first slot that is taken.
            stop: [B] int64, the slot behind the last one.

        Raises:
            ValueError: `source` belongs to another session, or a row or a slot is out of its range.
        """
        ...

    def reset(self) -> None:
        """Fill every buffer with zeros."""
        ...


class Session(Protocol):
    """A runtime that has loaded the two graphs."""

    @property
    def contract(self) -> Contract:
        """What the graphs promise."""
        ...

    @property
    def info(self) -> SessionInfo:
        """What the session runs on."""
        ...

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> Cache:
        """A zero-filled cache for `batch_size` rows of at most `limit` slots (default: what the model allows)."""
        ...

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        """Logits [B, N, V] float32 of the tokens at `logit_positions`; writes the cache in place.

        Args:
            cache: Rows to extend.
            input_ids: [B, S] int64; shorter rows are padded on the right with any valid id.
            past_length: [B] int64, tokens already in each row.
            logit_positions: [B, N] int64, indices into the S new tokens.
            new_length: [B] int64, how many tokens each row gains in all (with chunked prefill: the rest of the
                prompt, not the chunk). Fixes the base of rotary types that depend on the total length. Default:
                S for every row. Ignored by graphs that do not take it.
        """
        ...

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        """Logits [B, 1, V] float32 after one token a row, `input_ids` [B, 1]; writes the cache in place.

        The array may be reused by the next call: copy what must last.
        """
        ...

    def hidden_states(self) -> tuple[Floats, ...]:
        """Residual stream before each layer and after the last, of the latest call: num_layers + 1 x [B, S, E].

        Raises:
            RuntimeError: The session was opened without `debug_outputs`.
        """
        ...
