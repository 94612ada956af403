"""A progress bar for engine builds, which take minutes for large models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from kvgraph.runtime.tensorrt_api import BuilderConfig, TensorRT


@contextmanager
def show_progress(trt: TensorRT, config: BuilderConfig, label: str) -> Iterator[None]:
    """Show the builder's phases while the block runs; quiet where stderr is not a terminal."""
    base: Any = trt.IProgressMonitor

    class Monitor(base):  # type: ignore[misc]  # the base is known only once the flavour is chosen
        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                bar.reset(total=num_steps)
            bar.set_postfix_str(phase_name.lower(), refresh=False)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == "Building engine":
                bar.update()
            return True

        def phase_finish(self, phase_name: str) -> None:
            bar.refresh()

    with tqdm(desc=f"building from {label}", disable=None, leave=False) as bar:
        config.progress_monitor = Monitor()
        yield
