"""Writing `targets/<name>/`: complete or absent, and described by target.json."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import kvgraph
from kvgraph.export.bundle import Bundle, FileEntry, hash_file
from kvgraph.export.contract import Contract, GraphName
from kvgraph.export.writer import writing_directory
from kvgraph.runtime.target import TARGET_FILE, TARGET_SCHEMA_VERSION, Limits, Target, TargetGraph


def new_target(bundle: Bundle, name: str) -> AbstractContextManager[Path]:
    """A directory to fill; it replaces the bundle's target `name` when the block ends, and vanishes on an error."""
    return writing_directory(bundle.target_path(name), TARGET_FILE, force=True)


def write_target(
    directory: Path,
    bundle: Bundle,
    name: str,
    *,
    runtime_version: str,
    contract: Contract,
    graphs: Mapping[GraphName, TargetGraph],
    build_time_s: float,
    compute_capabilities: tuple[int, ...] = (),
    limits: Limits | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Describe a filled directory in its target.json; the arguments are the fields of `Target`."""
    files = {
        file.name: FileEntry(file.stat().st_size, hash_file(file))
        for file in sorted(directory.iterdir())
        if not file.name.startswith(".")
    }
    target = Target(
        path=directory,
        schema_version=TARGET_SCHEMA_VERSION,
        tool_version=kvgraph.__version__,
        name=name,
        runtime_version=runtime_version,
        compute_capabilities=compute_capabilities,
        bundle_digest=bundle.digest(),
        contract=contract,
        graphs=graphs,
        limits=limits,
        options=dict(options or {}),
        files=files,
        build_time_s=round(build_time_s, 3),
        # Linux counts it in KiB.
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    text = json.dumps(target.to_json(), indent=1, ensure_ascii=False)
    (directory / TARGET_FILE).write_text(text + "\n", encoding="utf-8")
