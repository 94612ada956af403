"""The flags of commands that compute on a CPU."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from kvgraph.numbers_argument import numbers

if TYPE_CHECKING:
    from kvgraph.runtime.threads import Threads


def add_thread_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --threads, --cores and --no-spin."""
    group = parser.add_argument_group("threads on a CPU")
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads (one a core, or one for each of --cores)"
    )
    group.add_argument(
        "--cores",
        type=numbers("processors such as 0,1,2"),
        metavar="N[,N...]",
        help="bind one thread to each of these processors",
    )
    group.add_argument(
        "--no-spin",
        action="store_true",
        help="let threads sleep between operators: slower, and leaves cores to others",
    )


def threads_of(args: argparse.Namespace) -> Threads | None:
    """What the flags ask for, None where there are none of them; with --cores the process is bound to those.

    Raises:
        ValueError: The flags do not go together, or the process may not use so many cores, or one of them.
    """
    from kvgraph.runtime.machine import core_count
    from kvgraph.runtime.threads import Threads

    if args.threads is None and args.cores is None and not args.no_spin:
        return None
    # More threads than cores wait for each other, and, spinning, keep the cores from doing anything else.
    if args.threads is not None and args.threads > core_count():
        raise ValueError(
            f"--threads is {args.threads}, but this process may use {core_count()} cores; give that many at most"
        )
    threads = Threads(args.threads, not args.no_spin, args.cores)
    if threads.cores is not None:
        _bind(threads.cores)
    return threads


def _bind(cores: tuple[int, ...]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("--cores needs Linux, whose processes can be bound to processors; leave it out")
    usable = os.sched_getaffinity(0)
    if not usable.issuperset(cores):
        have = ", ".join(str(core) for core in sorted(usable))
        raise ValueError(f"--cores names {', '.join(map(str, cores))}; this process may use {have}")
    os.sched_setaffinity(0, cores)
