"""The threads with which ONNX Runtime computes on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads share an operator, where they run, and what they do between two operators.

    Attributes:
        count: Threads, the calling one included; None for one a core, or one for each of `cores`.
        spin: A thread that waits for the next operator asks again and again, which keeps its core from others and
            starts the operator at once. Without it a decode step in 4 bits took 3% (1B shape) to 18% (135M) longer.
        cores: Processors, counted from 0 as the system does, to which the threads behind the calling one are bound:
            the first is left to the caller. None leaves it to the system.

    Raises:
        ValueError: No thread at all, or fewer cores than threads.
    """

    count: int | None = None
    spin: bool = True
    cores: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.count is not None and (type(self.count) is not int or self.count < 1):
            raise ValueError(
                f"threads is {self.count!r}, expected a number from 1 on, or None for one a core"
            )
        if self.cores is None:
            return
        if len(set(self.cores)) != len(self.cores) or any(core < 0 for core in self.cores):
            named = ", ".join(map(str, self.cores))
            raise ValueError(f"cores are {named}; expected numbers from 0 on, each once")
        if len(self.cores) < (self.count or 1):
            raise ValueError(
                f"cores names {len(self.cores)}, expected one for each of {self.count or 1} threads"
            )

    @classmethod
    def of(cls, threads: int | Threads | None) -> Threads:
        """Threads from a bare count."""
        return threads if isinstance(threads, Threads) else cls(threads)

    def configure(self, options: Any) -> None:
        """Set them in an `onnxruntime.SessionOptions`."""
        count = self.count if self.cores is None else self.count or len(self.cores)
        if count is not None:
            options.intra_op_num_threads = count
        if not self.spin:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if self.cores is not None and count is not None and count > 1:
            # ONNX Runtime counts processors from 1, and has no say over the calling thread.
            bound = ";".join(str(core + 1) for core in self.cores[1:count])
            options.add_session_config_entry("session.intra_op_thread_affinities", bound)
