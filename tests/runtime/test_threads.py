from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from kvgraph import cli
from kvgraph.export.bundle import Bundle
from kvgraph.runtime.threads import Threads
from kvgraph.thread_arguments import add_thread_arguments, threads_of

SPINNING = "session.intra_op.allow_spinning"
STOP = "session.force_spinning_stop"
AFFINITIES = "session.intra_op_thread_affinities"


def entry(options: Any, name: str) -> str | None:
    try:
        return str(options.get_session_config_entry(name))
    except RuntimeError:
        return None


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_thread_arguments(parser)
    return parser.parse_args(words)


def test_a_number_is_a_count() -> None:
    options = onnxruntime.SessionOptions()
    Threads.of(3).configure(options)
    assert (options.intra_op_num_threads, entry(options, SPINNING), entry(options, AFFINITIES)) == (
        3,
        None,
        None,
    )


def test_threads_are_bound_behind_the_calling_one() -> None:
    options = onnxruntime.SessionOptions()
    Threads(spin=False, cores=(4, 0, 2)).configure(options)
    # The runtime counts processors from 1.
    assert (options.intra_op_num_threads, entry(options, SPINNING), entry(options, AFFINITIES)) == (
        3,
        "0",
        "1;3",
    )


@pytest.mark.parametrize(("spin", "entries"), [(True, (None, "1")), (False, ("0", None))])
def test_threads_that_take_turns_stop_spinning_after_a_call(
    spin: bool, entries: tuple[str | None, str | None]
) -> None:
    options = onnxruntime.SessionOptions()
    Threads(2, spin).configure(options, takes_turns=True)
    assert (entry(options, SPINNING), entry(options, STOP)) == entries


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "threads is 0, expected a number from 1 on"),
        ({"count": "2"}, "threads is '2', expected a number"),
        ({"count": True}, "threads is True, expected a number"),
        ({"cores": (1, 1)}, "cores are 1, 1; expected numbers from 0 on, each once"),
        ({"cores": (-1,)}, "from 0 on"),
        ({"count": 3, "cores": (0, 1)}, "cores names 2, expected one for each of 3 threads"),
        ({"cores": ()}, "cores names 0"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Threads(**arguments)


def test_flags() -> None:
    assert threads_of(parsed()) is None
    assert threads_of(parsed("--threads", "1", "--no-spin")) == Threads(1, spin=False)
    with pytest.raises(ValueError, match=r"--threads is 9999, but this process may use \d+ cores"):
        threads_of(parsed("--threads", "9999"))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes to processors")
def test_cores_bind_the_process() -> None:
    usable = os.sched_getaffinity(0)
    core = max(usable)
    try:
        assert threads_of(parsed("--cores", str(core))) == Threads(cores=(core,))
        assert os.sched_getaffinity(0) == {core}
    finally:
        os.sched_setaffinity(0, usable)
    with pytest.raises(ValueError, match="--cores names 100000; this process may use"):
        threads_of(parsed("--cores", "100000"))


@pytest.mark.parametrize(
    ("command", "sessions"),
    [
        (["compare", "BUNDLE", "--against", "BUNDLE", "--prefill", "4", "--steps", "2"], 2),
        (["compare", "BUNDLE", "--against", "BUNDLE", "--prefill", "4", "--steps", "2", "--layers"], 2),
        (["perplexity", "BUNDLE", "--text", "TEXT", "--window", "32"], 1),
    ],
)
def test_commands_that_measure_a_model_take_them(
    command: list[str],
    sessions: int,
    exported: Callable[..., Bundle],
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "text").write_text("Once upon a time there was a cat.", encoding="utf-8")
    bundle = exported(repository / "tests" / "tiny_model" / "model").path
    words = {"BUNDLE": str(bundle), "TEXT": str(tmp_path / "text")}
    seen: list[Threads] = []
    configure = Threads.configure

    def record(threads: Threads, *arguments: Any) -> None:
        seen.append(threads)
        configure(threads, *arguments)

    monkeypatch.setattr(Threads, "configure", record)
    assert cli.main([*(words.get(word, word) for word in command), "--threads", "1", "--no-spin"]) == 0
    # A session has a graph for prefill and one for decode.
    assert seen == [Threads(1, spin=False)] * 2 * sessions
