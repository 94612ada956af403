"""What `kvgraph build` made of a bundle: `targets/<name>/`, described by its target.json.

An engine or a lowered graph belongs to one bundle, one version of one runtime and, on a GPU, to certain compute
capabilities. `Target` knows them, so that a mismatch is one clear message and not a failed deserialization.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvgraph.export.bundle import TARGETS, Bundle, FileEntry, check_entry, read_description
from kvgraph.export.contract import Contract, GraphName

TARGET_SCHEMA_VERSION = 1
TARGET_FILE = "target.json"


@dataclass(frozen=True, slots=True)
class TargetGraph:
    """How a target runs one of the graphs.

    Attributes:
        file: Engine or graph file.
        source: The canonical graph it was made from: where one engine serves both, decode comes from "prefill", and
            takes `logit_positions` as that does.
        profile: Index of the engine's optimization profile; None without profiles.
        shapes: Input -> its smallest, usual and largest shape in that profile (for a shape input: values).
    """

    file: str
    source: GraphName
    profile: int | None
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest sizes that an engine is built for.

    Attributes:
        max_batch: Most rows.
        max_context: T, slots of a row of the cache.
        prefill_chunk: Most new tokens of a prefill call.
        max_source: Most tokens of a source; None without an encoder.
    """

    max_batch: int
    max_context: int
    prefill_chunk: int
    max_source: int | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What target.json says, and where it is.

    Attributes:
        path: The directory.
        schema_version: Version of target.json's form.
        tool_version: kvgraph that built it.
        name: "ort-cpu", "tensorrt" or "tensorrt-rtx".
        runtime_version: Version of that runtime at build time.
        compute_capabilities: What an engine runs on, 89 for SM89; empty for a CPU.
        bundle_digest: `Bundle.digest` of the bundle that it was built from.
        contract: What the built graphs promise: the bundle's with the capacity bound or types widened.
        graphs: How each graph is run.
        limits: Sizes that an engine is built for; None where there are none.
        options: Other options of the build.
        files: Name -> size and sha256 of every file of the target.
        build_time_s: Seconds that the build took.
        peak_memory_bytes: Peak resident memory of the process that built it.
    """

    path: Path
    schema_version: int
    tool_version: str
    name: str
    runtime_version: str
    compute_capabilities: tuple[int, ...]
    bundle_digest: str
    contract: Contract
    graphs: Mapping[GraphName, TargetGraph]
    limits: Limits | None
    options: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    build_time_s: float
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """target.json's content."""
        data = {key: value for key, value in asdict(self).items() if key != "path"}
        return {**data, "contract": self.contract.to_json()}

    def graph_path(self, graph: GraphName) -> Path:
        """The file that runs a graph."""
        return self.path / self.graphs[graph].file

    @classmethod
    def open(cls, bundle: Bundle, name: str, verify: bool = False) -> Target:
        """Read a target of a bundle, and check that it is whole and was built from this very bundle.

        Args:
            bundle: The bundle.
            name: Which target.
            verify: Also hash every file.

        Raises:
            FileNotFoundError: The bundle has no such target.
            ValueError: The target is incomplete, changed, or built from other graphs or weights.
        """
        path = bundle.target_path(name)
        target = cls._parse(path, _read_json(bundle, path))
        if target.bundle_digest != bundle.digest():
            raise ValueError(
                f"{path / TARGET_FILE}: built from a bundle with digest {target.bundle_digest[:12]}, this bundle has "
                f"{bundle.digest()[:12]}; {_build_again(bundle, name)}"
            )
        for file, entry in target.files.items():
            if Path(file).name != file:
                raise ValueError(
                    f"{path / TARGET_FILE}: file {file!r} leaves the target; {_build_again(bundle, name)}"
                )
            check_entry(path / file, entry, TARGET_FILE, verify, _build_again(bundle, name))
        return target

    @classmethod
    def _parse(cls, path: Path, data: dict[str, Any]) -> Target:
        version = data.get("schema_version")
        if not isinstance(version, int) or version > TARGET_SCHEMA_VERSION:
            raise ValueError(
                f"{path / TARGET_FILE}: schema version {version!r}, this kvgraph reads up to {TARGET_SCHEMA_VERSION}; "
                f"install kvgraph {data.get('tool_version', '(unknown)')} or newer, or build the target again"
            )
        try:
            contract = Contract.from_json(data["contract"])
            return cls(
                **{
                    **data,
                    "path": path,
                    "compute_capabilities": tuple(data["compute_capabilities"]),
                    "contract": contract,
                    "graphs": {graph: TargetGraph(**data["graphs"][graph]) for graph in contract.graphs},
                    "limits": None if data["limits"] is None else Limits(**data["limits"]),
                    "files": {name: FileEntry(**entry) for name, entry in data["files"].items()},
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path / TARGET_FILE}: not a target description ({error}); build it again"
            ) from error

    def check_runtime(self, version: str, compute_capability: int, again: str) -> None:
        """Refuse an engine of another TensorRT or for another GPU, before it is deserialized.

        Args:
            version: Of the installed TensorRT.
            compute_capability: Of the device, 89 for SM89.
            again: The command that builds the target, `Bundle.build_command`.

        Raises:
            ValueError: The engine does not run there; the message says what it was built for.
        """
        if version != self.runtime_version:
            raise ValueError(
                f"{self.path / TARGET_FILE}: built with {self.name} {self.runtime_version}, {version} is installed, "
                f"and an engine runs under its own version alone; install that one, or build again: {again}"
            )
        if compute_capability not in self.compute_capabilities:
            built = ", ".join(f"SM{capability}" for capability in self.compute_capabilities)
            flag = f" --compute-capability {compute_capability}" if self.name == "tensorrt-rtx" else ""
            raise ValueError(
                f"{self.path / TARGET_FILE}: built for {built}, this GPU is SM{compute_capability}; "
                f"build again: {again}{flag}"
            )


def available_targets(bundle: Bundle) -> list[str]:
    """Names of the finished targets of a bundle."""
    return sorted(file.parent.name for file in (bundle.path / TARGETS).glob(f"*/{TARGET_FILE}"))


def _read_json(bundle: Bundle, path: Path) -> dict[str, Any]:
    file = path / TARGET_FILE
    if not file.is_file():
        there = ", ".join(available_targets(bundle)) or "none"
        raise FileNotFoundError(
            f"{bundle.path}: no target {path.name!r} (built: {there}); {_build_again(bundle, path.name)}"
        )
    return read_description(file, _build_again(bundle, path.name))


def _build_again(bundle: Bundle, name: str) -> str:
    return f"build it with {bundle.build_command(name)}"
