"""A checkpoint on disk: its configuration, its weights and what belongs to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from kvgraph.models.config import DTYPES, ModelConfig
from kvgraph.models.digest import sampled_digest
from kvgraph.models.hub import fetch_snapshot, is_hub_id
from kvgraph.models.quantized.coded import QuantizedCheckpoint
from kvgraph.models.quantized.reader import SETTINGS_FILE, SETTINGS_KEY, read_quantized
from kvgraph.models.shards import stored_tensors
from kvgraph.models.strict_json import read_json_object
from kvgraph.models.weights import WeightStream

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TOKENIZER_FILE = "tokenizer.json"
# What goes into a bundle as it is.
CARRIED_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "chat_template.jinja",
    GENERATION_CONFIG_FILE,
    "special_tokens_map.json",
)
# An argument with one of these endings is meant as a file, not as the name of a hub checkpoint.
FILE_SUFFIXES = (".json", ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx")


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Where a checkpoint comes from.

    Attributes:
        kind: "directory", "hub", "gguf", or "config" for a bare config.json.
        name: The path or hub id as it was given.
        revision: Commit of a hub checkpoint, else None.
    """

    kind: Literal["directory", "hub", "gguf", "config"]
    name: str
    revision: str | None = None

    @property
    def has_weights(self) -> bool:
        """Whether there is more than a configuration."""
        return self.kind != "config"


class Checkpoint(Protocol):
    """An opened checkpoint of any format, described as Hugging Face describes its own."""

    @property
    def source(self) -> CheckpointSource:
        """Where it comes from."""

    @property
    def config_json(self) -> dict[str, Any]:
        """The content of config.json."""

    @property
    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, or {} without one."""

    @property
    def config(self) -> ModelConfig:
        """What the model is."""

    def weights(self) -> WeightStream:
        """The weights as float ones, with every header checked."""

    def quantized(self) -> QuantizedCheckpoint | None:
        """The weights as the checkpoint holds them, where they are quantized; None of a float checkpoint."""

    def dtype(self) -> str:
        """Type to load the weights in."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer to carry along."""

    def write_tokenizer(self, directory: Path) -> None:
        """Write generation_config.json, tokenizer.json and what goes with it, as far as there are any."""

    def files(self) -> dict[str, int]:
        """Name and size of every file that it consists of."""

    def digest(self, *, weights: bool = True) -> str:
        """SHA-256 that identifies it, of its configuration alone where `weights` is off."""


@dataclass(frozen=True, slots=True)
class HuggingFaceCheckpoint:
    """A directory as Hugging Face lays it out; nothing but its small JSON files is in memory.

    Attributes:
        directory: Where its files are.
        config_json: config.json as it stands.
        generation_config: generation_config.json, or {} without one.
        source: Where it comes from.
        config_file: The file that `config_json` is from.
    """

    directory: Path
    config_json: dict[str, Any]
    generation_config: dict[str, Any]
    source: CheckpointSource
    config_file: Path

    @property
    def config(self) -> ModelConfig:
        """What the model is.

        Raises:
            ValueError: See `ModelConfig.from_hf`.
        """
        # What it says of its weights is of use with weights alone, see `quantized`.
        described = self.source.has_weights and SETTINGS_KEY in self.config_json
        config = {
            key: value for key, value in self.config_json.items() if not described or key != SETTINGS_KEY
        }
        return ModelConfig.from_hf(config)

    def weights(self) -> WeightStream:
        """The weights as float ones, with every header checked.

        Raises:
            FileNotFoundError: A file of the weights is missing.
            ValueError: A file is damaged, or this is a bare config.json.
        """
        if not self.source.has_weights:
            raise ValueError(f"{self.config_file} is a configuration alone; give the checkpoint's directory")
        found = self.quantized()
        return WeightStream(self.directory) if found is None else found.float_weights(self.directory)

    def quantized(self) -> QuantizedCheckpoint | None:
        """See `Checkpoint.quantized`.

        Raises:
            FileNotFoundError: A file of the weights is missing.
            ValueError: The checkpoint is quantized in a way that is not implemented, or is damaged.
        """
        return read_quantized(self.directory, self.config_json) if self.source.has_weights else None

    def dtype(self) -> str:
        """Type to load the weights in: what config.json says, else the type of the first weight.

        Raises:
            ValueError: Neither says it.
        """
        if (said := self.config.dtype) is not None:
            return said
        if self.source.has_weights:
            for dtype in self._float_dtypes():
                if dtype in DTYPES:
                    return dtype
        raise ValueError(f"{self.config_file}: dtype is missing; name it there or with --dtype")

    def _float_dtypes(self) -> Iterator[str]:
        """Type of every tensor that is not coded, file by file."""
        found = self.quantized()
        weights = self.weights()
        for name in weights.names if found is None else found.plain:
            yield str(weights.spec(name).dtype).removeprefix("torch.")

    def tokenizer_files(self) -> list[Path]:
        """The files that a bundle carries along: generation_config.json, tokenizer.json and what goes with it.

        Vocabularies in other formats (tokenizer.model, vocab.json with merges.txt) are not carried, nor is what
        goes with them; see `has_tokenizer`.
        """
        if not self.source.has_weights:
            return []
        names = CARRIED_FILES if self.has_tokenizer else (GENERATION_CONFIG_FILE,)
        return [self.directory / name for name in names if (self.directory / name).is_file()]

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer.json to carry along."""
        return self.source.has_weights and (self.directory / TOKENIZER_FILE).is_file()

    def write_tokenizer(self, directory: Path) -> None:
        """Copy `tokenizer_files` into a directory."""
        for file in self.tokenizer_files():
            shutil.copyfile(file, directory / file.name)

    def files(self) -> dict[str, int]:
        """Name and size of every file but hidden ones; of a bare config.json its own."""
        if not self.source.has_weights:
            return {self.config_file.name: self.config_file.stat().st_size}
        entries = sorted(self.directory.iterdir())
        return {
            entry.name: entry.stat().st_size for entry in entries if entry.is_file() and entry.name[0] != "."
        }

    def digest(self, *, weights: bool = True) -> str:
        """SHA-256 that identifies the checkpoint; samples large weights, see `kvgraph.models.digest`.

        Args:
            weights: Whether to cover the weights; a bare config.json has none to cover.

        Raises:
            FileNotFoundError: A file of the weights is missing.
            ValueError: A file of the weights is damaged.
        """
        covered = weights and self.source.has_weights
        tensors = stored_tensors(self.directory).values() if covered else ()
        settings = self.directory / SETTINGS_FILE
        described = [self.config_file, *([settings] if covered and settings.is_file() else [])]
        return sampled_digest([*described, *self.tokenizer_files()], tensors)


def open_checkpoint(source: str | Path, revision: str | None = None, *, weights: bool = True) -> Checkpoint:
    """Open a checkpoint directory, a GGUF file, a hub checkpoint, or a bare config.json.

    Args:
        source: Path of a directory, of a GGUF file (the first of several) or of a config.json, or else a hub id.
        revision: Branch, tag or commit of a hub checkpoint.
        weights: Whether to fetch a hub checkpoint's weights, too.

    Raises:
        FileNotFoundError: There is no such path, or no config.json in it.
        OSError: Fetching from the hub failed.
        ImportError: `source` is a GGUF file, and the gguf package is not installed.
        ValueError: A JSON or GGUF file is malformed, or `source` is another kind of file.
    """
    path = Path(source)
    if path.exists():
        if revision is not None:
            raise ValueError(
                f"revision {revision!r} is for hub checkpoints, but {path} is on disk; leave it out"
            )
        return (
            _open_file(path, str(source))
            if path.is_file()
            else _open_directory(path, CheckpointSource("directory", str(source)))
        )
    if isinstance(source, Path) or _looks_like_a_path(source):
        raise FileNotFoundError(f"no such directory: {source}")
    directory, commit = fetch_snapshot(source, revision, weights=weights)
    return _open_directory(directory, CheckpointSource("hub", source, commit))


def _open_directory(directory: Path, source: CheckpointSource) -> HuggingFaceCheckpoint:
    config = directory / CONFIG_FILE
    if not config.is_file():
        raise FileNotFoundError(f"{directory}: no {CONFIG_FILE}; expected a Hugging Face checkpoint")
    generation = directory / GENERATION_CONFIG_FILE
    generation_config = read_json_object(generation) if generation.is_file() else {}
    return HuggingFaceCheckpoint(directory, read_json_object(config), generation_config, source, config)


def _open_file(path: Path, name: str) -> Checkpoint:
    if path.suffix == ".gguf":
        return _open_gguf(path, CheckpointSource("gguf", name))
    if path.suffix != ".json":
        raise ValueError(
            f"{path} is a file; give the directory of a checkpoint, a GGUF file, or a config.json"
        )
    source = CheckpointSource("config", name)
    return HuggingFaceCheckpoint(path.parent, read_json_object(path), {}, source, path)


def _open_gguf(path: Path, source: CheckpointSource) -> Checkpoint:
    # Imported here since most checkpoints do without the gguf package.
    try:
        from kvgraph.models.gguf_checkpoint import open_gguf
    except ImportError as error:
        raise ImportError(f"reading {path} needs gguf; pip install 'kvgraph[export]'") from error
    return open_gguf(path, source)


def _looks_like_a_path(text: str) -> bool:
    starts = text.startswith((".", "~", os.sep))
    return starts or text.endswith((*FILE_SUFFIXES, "/", os.sep)) or not is_hub_id(text)
