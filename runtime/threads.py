"""The threads with which ONNX Runtime computes on a CPU.

Each session has threads of its own, which go on spinning for 20 to 40 ms after a call. Where a bundle needs two
sessions, those of the one that has just run take cores from the other. So sessions that take turns stop spinning when
a call ends (`session.force_spinning_stop`), and spin within it as ever. Measured on two cores, other processes kept off
them, a 135M shape with INT8 prefill and INT4 decode; ranges are those of three series, of which each gave its fastest
median (of prompts, its fastest one):

| | 8 decode steps after 512 tokens | chunks of 16 tokens and decode steps in turns | prompt, tokens/s |
|---|---|---|---|
| both sessions spin on | 41 to 46 ms | 9.6 to 13.5 and 3.4 to 3.7 ms | 1990 to 2360 |
| both stop | 31 to 33 | 8.6 to 11.4 and 3.1 to 3.4 | 1970 to 2360 |
| prefill's alone stops | 30 to 33 | 13.5 to 14.0 and 3.2 to 3.4 | 2260 to 2370 |
| prefill's never spins | 30 to 34 | 13.8 to 14.3 and 3.2 to 3.5 | 1920 to 2240 |
| INT4 alone, one session | 31 to 34 | 9.0 to 9.2 and 3.1 to 3.3 | 1780 to 2000 |

Later decode steps took the same time in all. One pool for both, that of ONNX Runtime's environment, is no choice for a
library: `set_global_thread_pool_sizes` can be called once in a process, and from then on no code there can open a
session with threads of its own (onnxruntime 1.32). It takes sizes alone, no affinity and no word about spinning.
"""

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

    def configure(self, options: Any, takes_turns: bool = False) -> None:
        """Set them in an `onnxruntime.SessionOptions`.

        Args:
            options: Of the session.
            takes_turns: Another session computes between two calls of this one: leave the cores to it.
        """
        count = self.count if self.cores is None else self.count or len(self.cores)
        if count is not None:
            options.intra_op_num_threads = count
        if not self.spin:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        elif takes_turns:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        if self.cores is not None and count is not None and count > 1:
            # ONNX Runtime counts processors from 1, and has no say over the calling thread.
            bound = ";".join(str(core + 1) for core in self.cores[1:count])
            options.add_session_config_entry("session.intra_op_thread_affinities", bound)
