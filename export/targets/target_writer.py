"""Writing `targets/<name>/`: complete or absent, and described by target.json."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvgraph
from kvgraph.export.bundle import Bundle, FileEntry, hash_file
from kvgraph.export.contract import Contract, GraphName
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.export.writer import writing_directory
from kvgraph.runtime.target import TARGET_FILE, TARGET_SCHEMA_VERSION, Limits, Target, TargetGraph


def new_target(bundle: Bundle, name: str) -> AbstractContextManager[Path]:
    """A directory to fill; it replaces the bundle's target `name` when the block ends, and vanishes on an error."""
    return writing_directory(bundle.target_path(name), TARGET_FILE, force=True)


@dataclass(frozen=True, slots=True)
class BuiltTarget:
    """What a build knows of its result; the fields are those of `kvgraph.runtime.target.Target`.

    `hashes` has the sha256 of files that were hashed while they were written.
    """

    runtime_version: str
    contract: Contract
    graphs: Mapping[GraphName, TargetGraph]
    compute_capabilities: tuple[int, ...] = ()
    limits: Limits | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)


def require_weights(bundle: Bundle) -> None:
    """Refuse a bundle of graphs alone, or of a target alone.

    Raises:
        ValueError: The bundle has no weights.
    """
    bundle.require_whole("kvgraph build")
    if WEIGHTS_FILE not in bundle.files:
        raise ValueError(
            f"{bundle.path}: has graphs and no weights, nothing to build; export without --no-weights"
        )


def write_target(directory: Path, bundle: Bundle, name: str, built: BuiltTarget, build_time_s: float) -> None:
    """Describe a filled directory in its target.json."""
    files = {
        file.name: FileEntry(file.stat().st_size, built.hashes.get(file.name) or hash_file(file))
        for file in sorted(directory.iterdir())
        if not file.name.startswith(".")
    }
    target = Target(
        path=directory,
        schema_version=TARGET_SCHEMA_VERSION,
        tool_version=kvgraph.__version__,
        name=name,
        runtime_version=built.runtime_version,
        compute_capabilities=built.compute_capabilities,
        bundle_digest=bundle.digest(),
        contract=built.contract,
        graphs=built.graphs,
        limits=built.limits,
        options=built.options,
        files=files,
        build_time_s=round(build_time_s, 3),
        # Linux counts it in KiB.
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )
    text = json.dumps(target.to_json(), indent=1, ensure_ascii=False)
    (directory / TARGET_FILE).write_text(text + "\n", encoding="utf-8")
