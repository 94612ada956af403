"""The bundle: a directory with a model's graphs, one weights file, a tokenizer, and `bundle.json` that describes them.

This reader imports neither torch nor onnx; what writes bundles is in `kvgraph.export.writer`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvgraph.export.bundle_consistency import check_consistent
from kvgraph.export.contract import GRAPHS, Contract, GraphName, graph_file
from kvgraph.export.standalone import Standalone
from kvgraph.export.weight_kinds import tensor_bytes

SCHEMA_VERSION = 1
BUNDLE_FILE = "bundle.json"
TARGETS = "targets"
# Says in a weight's description that it belongs to a rotated bundle, see `kvgraph.quant.rotated_bundle`.
ROTATED = "rotated"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size in bytes and sha256 of a file of the bundle."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """What bundle.json says, and where it is.

    Attributes:
        path: The directory.
        schema_version: Version of bundle.json's form.
        tool_version: kvgraph that wrote it.
        model_type: Family.
        config: `ModelConfig.to_json()` of the model.
        dtype: Type of weights, activations and cache: "float32", "float16" or "bfloat16".
        residual_dtype: Type of the residual stream.
        contract: What the graphs promise.
        recipe: Graph -> its quantization recipe; None for a float bundle.
        source: Kind, name, revision and digest of the checkpoint.
        weights: Tensor name -> its dtype, shape, source name and whether it is transposed.
        files: Name -> size and sha256 of every file except bundle.json and targets; of one target alone its files, too.
        versions: Packages that made the bundle.
        quantization: What quantization did and what it cost, see `kvgraph.quant.proof`; None for a float bundle.
        standalone: The one target that there is instead of canonical graphs; None for a whole bundle.
    """

    path: Path
    schema_version: int
    tool_version: str
    model_type: str
    config: Mapping[str, Any]
    dtype: str
    residual_dtype: str
    contract: Contract
    recipe: Mapping[str, Any] | None
    source: Mapping[str, Any]
    weights: Mapping[str, Mapping[str, Any]]
    files: Mapping[str, FileEntry]
    versions: Mapping[str, str]
    quantization: Mapping[str, Any] | None = None
    standalone: Standalone | None = None

    @property
    def is_rotated(self) -> bool:
        """Whether the residual stream and the cache's values are those of the checkpoint in another basis."""
        return any(entry.get(ROTATED, False) for entry in self.weights.values())

    @property
    def recipe_name(self) -> str | None:
        """As `--recipe` spells it: "int8-wo", or "prefill=int8-sq,decode=int4-wo"; None for a float bundle."""
        return _recipe_name(self.recipe)

    def graph_path(self, graph: GraphName) -> Path:
        """The canonical ONNX file of a graph.

        Raises:
            ValueError: The bundle holds a target alone.
        """
        self.require_whole("this")
        return self.path / graph_file(graph)

    def target_path(self, name: str) -> Path:
        """Where `kvgraph build --target name` puts its work."""
        return self.path / TARGETS / name

    def choose_target(self, asked: str | None) -> str | None:
        """The target to run: the one asked for, else the one that the bundle holds alone; None for canonical graphs.

        Raises:
            ValueError: The bundle holds another target alone.
        """
        return asked if self.standalone is None else self.standalone.choose(self.path, asked)

    def require_whole(self, what: str) -> None:
        """Refuse a target alone for what is done with canonical graphs and weights.

        Args:
            what: That, for the message.

        Raises:
            ValueError: The bundle holds a target alone.
        """
        if self.standalone is not None:
            self.standalone.refuse(self.path, what)

    def build_command(self, target: str) -> str:
        """The command that builds a target of this bundle, or again the one that it holds alone."""
        if self.standalone is None:
            return f"kvgraph build {self.path} --target {target}"
        return self.standalone.build_command(self.path, target)

    def weight_sizes(self) -> dict[str, int]:
        """Tensor name -> its bytes in the canonical weights file."""
        return {
            name: tensor_bytes(entry["dtype"], math.prod(entry["shape"]))
            for name, entry in self.weights.items()
        }

    def digest(self) -> str:
        """sha256 over the names and hashes of the graphs and the weights: what a target is built from."""
        if self.standalone is not None:
            return self.standalone.digest
        graphs = [graph_file(graph) for graph in self.contract.graphs]
        parts = [
            f"{name}:{self.files[name].sha256}"
            for name in [*graphs, "weights.safetensors"]
            if name in self.files
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """bundle.json's content."""
        data = {key: value for key, value in asdict(self).items() if key != "path"}
        # So that whole bundles are read by versions that know no others.
        if self.standalone is None:
            del data["standalone"]
        return {**data, "contract": self.contract.to_json()}

    @classmethod
    def open(cls, path: str | Path, verify: bool = False) -> Bundle:
        """Read and check a bundle: sizes always, hashes on request.

        Args:
            path: The directory.
            verify: Also hash every file.

        Raises:
            FileNotFoundError: There is no such directory, or it holds no bundle.json.
            ValueError: The bundle is of a newer schema, incomplete or changed.
        """
        path = Path(path)
        bundle = cls._parse(path, _read_json(path))
        for name in bundle.files:
            bundle._check_file(name, verify)
        return bundle

    @classmethod
    def _parse(cls, path: Path, data: dict[str, Any]) -> Bundle:
        file = path / BUNDLE_FILE
        version = data.get("schema_version")
        # bool is an int, too.
        if type(version) is not int or version < 1:
            raise ValueError(f"{file}: schema version {version!r}, expected a whole number; export it again")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"{file}: schema version {version!r}, this kvgraph reads up to {SCHEMA_VERSION}; "
                f"install kvgraph {data.get('tool_version', '(unknown)')} or newer"
            )
        try:
            files = {name: FileEntry(**entry) for name, entry in data["files"].items()}
            contract = Contract.from_json(data["contract"])
            _recipe_name(data["recipe"])
            alone = Standalone(**data["standalone"]) if "standalone" in data else None
            bundle = cls(**{**data, "path": path, "files": files, "contract": contract, "standalone": alone})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: not a bundle description ({error!r}); export it again") from error
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        needed = [] if alone else [graph_file(graph) for graph in contract.graphs]
        if missing := [name for name in needed if name not in files]:
            raise ValueError(f"{file}: does not list {', '.join(missing)}; export the bundle again")
        check_consistent(file, bundle.config, bundle.dtype, bundle.residual_dtype, contract)
        return bundle

    @contextmanager
    def verifying(self) -> Iterator[None]:
        """Hash every file while the block works; on leaving, however that comes about, a changed one is what is raised.

        Raises:
            ValueError: A file was changed: what the block has made of it is not to be used.
        """
        with ThreadPoolExecutor(1) as pool:
            verified = pool.submit(self._verify)
            try:
                yield
            finally:
                verified.result()

    def _verify(self) -> None:
        for name in self.files:
            self._check_file(name, verify=True)

    def verify_graphs(self) -> None:
        """Hash the graphs, which are small beside the weights.

        Raises:
            ValueError: One was changed, or the bundle holds a target alone.
        """
        self.require_whole("this")
        for graph in self.contract.graphs:
            self._check_file(graph_file(graph), verify=True)

    def _check_file(self, name: str, verify: bool) -> None:
        """A listed file lies inside the bundle, has its size and, on request, its hash."""
        file = self.path / name
        # Links count by where they lead: ONNX Runtime does not follow them out of a model's directory, either.
        if not file.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(
                f"{self.path / BUNDLE_FILE}: file {name!r} leaves the bundle, to {file.resolve()}; refused, copy it in"
            )
        alone = self.standalone
        mend = "export again" if alone is None else f"build it again with {self.build_command(alone.target)}"
        check_entry(file, self.files[name], BUNDLE_FILE, verify, mend)


def _recipe_name(recipe: Mapping[str, Any] | None) -> str | None:
    if recipe is None:
        return None
    prefill, decode = (recipe[graph]["name"] for graph in GRAPHS)
    return prefill if prefill == decode else f"prefill={prefill},decode={decode}"


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such bundle; make one with kvgraph export CHECKPOINT -o {path}")
    file = path / BUNDLE_FILE
    if not file.is_file():
        raise FileNotFoundError(
            f"{path}: holds no {BUNDLE_FILE}, so it is not a finished bundle; export it again"
        )
    return read_description(file, "export the bundle again")


def read_description(file: Path, mend: str) -> dict[str, Any]:
    """The object in a JSON file that describes others.

    Raises:
        ValueError: It holds none; `mend` says what to do.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not valid JSON ({error}); {mend}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file}: holds a {type(data).__name__}, expected an object; {mend}")
    return data


def check_entry(file: Path, entry: FileEntry, listed_in: str, verify: bool, mend: str) -> None:
    """A file is there, has its size and, on request, its hash.

    Args:
        file: The file.
        entry: What `listed_in` says of it.
        listed_in: The description's name.
        verify: Also hash it.
        mend: What to do where it is not so.

    Raises:
        ValueError: It is not so.
    """
    if not file.is_file():
        raise ValueError(f"{file}: missing, though {listed_in} lists it; copy the whole directory or {mend}")
    if (size := file.stat().st_size) != entry.size:
        raise ValueError(f"{file}: {size} bytes, {listed_in} says {entry.size}; the file is damaged, {mend}")
    if verify and (found := hash_file(file)) != entry.sha256:
        raise ValueError(
            f"{file}: sha256 {found}, {listed_in} says {entry.sha256}; the file was changed, {mend}"
        )


def hash_file(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
