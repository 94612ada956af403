"""`kvgraph build --standalone DIR`: a bundle of one target alone, which runs without the bundle that it was built from.

It holds the target, the tokenizer's files and a bundle.json that lists all of them. The canonical graphs and weights
stay behind; only a target that has no weights of its own, and reads the bundle's, takes that file along.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import kvgraph
from kvgraph.export.bundle import BUNDLE_FILE, TARGETS, Bundle, FileEntry, hash_file
from kvgraph.export.contract import graph_file
from kvgraph.export.standalone import Standalone
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.export.writer import refuse_nested, write_description, writing_directory
from kvgraph.runtime.target import TARGET_FILE, Target

# In target.json: an ort-cpu target for ONNX Runtime's own kernels maps the bundle's weights.
_BORROWS_WEIGHTS = {"kernels": "onnxruntime"}


def build_standalone(
    bundle: Bundle, output: str | Path, build: Callable[[], Target], *, force: bool = False
) -> Bundle:
    """Build a target of a bundle, and copy it into a bundle of its own.

    Args:
        bundle: What to build; its `targets/` holds the target, too.
        output: The directory to write.
        build: Makes the target; it is called when nothing speaks against the output.
        force: Replace a bundle that is there.

    Raises:
        ValueError: The bundle holds a target alone itself, the output lies inside or around it, or a file that is
            copied was changed.
        FileExistsError: The output exists and `force` is off.
    """
    bundle.require_whole("kvgraph build")
    refuse_nested(output, bundle, "the bundle to build")
    with writing_directory(output, BUNDLE_FILE, force, (TARGETS,)) as directory:
        target = build()
        files = {name: bundle.files[name] for name in sorted(_borrowed(bundle, target))} | _own(target)
        for name in files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.path / name, directory / name)
        alone = replace(
            bundle,
            path=directory,
            tool_version=kvgraph.__version__,
            files=files,
            standalone=Standalone(target.name, bundle.digest()),
        )
        write_description(alone)
        # What lay damaged in the bundle, or was damaged on the way, is found before it is shipped.
        Target.open(Bundle.open(directory, verify=True), target.name)
    return Bundle.open(output)


def _borrowed(bundle: Bundle, target: Target) -> set[str]:
    """Files of the bundle itself that the target's user reads: the tokenizer's, and weights where it has none."""
    graphs = {graph_file(graph) for graph in bundle.contract.graphs}
    borrows = _BORROWS_WEIGHTS.items() <= target.options.items()
    return bundle.files.keys() - (graphs if borrows else graphs | {WEIGHTS_FILE})


def _own(target: Target) -> dict[str, FileEntry]:
    """The target's files under their names in a bundle."""
    folder, description = f"{TARGETS}/{target.name}", target.path / TARGET_FILE
    own = {f"{folder}/{name}": entry for name, entry in target.files.items()}
    entry = FileEntry(description.stat().st_size, hash_file(description))
    return own | {f"{folder}/{TARGET_FILE}": entry}
