"""Virtual environments of the peers, and processes in them whose time and memory are taken."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import venv
from pathlib import Path

from peer_rows import ENVIRONMENTS, TORCH


def python_of(folder: Path, engine: str) -> Path:
    """The interpreter of an engine; its environment is made where it is missing. kvgraph's is this one."""
    if engine not in ENVIRONMENTS:
        return Path(sys.executable)
    directory = folder / engine
    python = directory / "bin" / "python"
    ready = directory / ".ready"
    wanted = repr(ENVIRONMENTS[engine])
    if not ready.exists() or ready.read_text() != wanted:
        _install(directory, python, engine)
        ready.write_text(wanted)
    return python


def _install(directory: Path, python: Path, engine: str) -> None:
    environment = ENVIRONMENTS[engine]
    venv.create(directory, clear=True, with_pip=True)
    # Every call is held to this torch: a dependency may otherwise replace it by one for another device.
    constraint = directory / "constraint.txt"
    constraint.write_text(TORCH + "\n")
    pip = [str(python), "-m", "pip", "--quiet"]
    variables = {**os.environ, **environment.variables}
    for requirements in ((TORCH,), environment.requirements):
        subprocess.run([*pip, "install", "-c", str(constraint), *requirements], check=True, env=variables)
    if environment.remove:
        subprocess.run([*pip, "uninstall", "--yes", *environment.remove], check=True)
    code = "import importlib.metadata as m; print(m.version('torch'))"
    found = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout
    if found.strip().partition("+")[0] != TORCH.partition("==")[2]:
        raise RuntimeError(f"the environment of {engine} has torch {found.strip()}, expected {TORCH}")


def environment_variables(threads: int) -> dict[str, str]:
    """The same threads for every library that a child may load."""
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def run_measured(
    command: list[str], variables: dict[str, str], log: Path, timeout_s: float
) -> dict[str, float]:
    """Run to the end; returns the seconds it took and the peak memory of the largest process.

    Raises:
        subprocess.CalledProcessError: It failed or hung; `stderr` is its last line.
    """
    start = time.perf_counter()
    with log.open("ab+") as output:
        begin = output.seek(0, os.SEEK_END)
        child = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        # With what it started itself.
        timer = threading.Timer(timeout_s, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        try:
            # Not child.wait: this one tells the memory, of the process and of those that it waited for.
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
        finally:
            timer.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(begin)
        lines = output.read().decode(errors="replace").replace("\r", "\n").split("\n")
    if child.returncode != 0:
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        raise subprocess.CalledProcessError(child.returncode, command, stderr=last[-200:])
    return {"seconds": time.perf_counter() - start, "peak_bytes": usage.ru_maxrss * 1024}
