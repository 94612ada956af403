"""A GGUF file as a checkpoint: its metadata as config.json and tokenizer files, its tensors as weights."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgraph.models.checkpoint import GENERATION_CONFIG_FILE, CheckpointSource
from kvgraph.models.config import ModelConfig
from kvgraph.models.digest import sampled_digest
from kvgraph.models.gguf_architectures import hugging_face_config, hugging_face_weights
from kvgraph.models.gguf_codes import coded_weights
from kvgraph.models.gguf_file import GGUFFile
from kvgraph.models.gguf_parts import read_parts
from kvgraph.models.gguf_tokenizer import generation_config, tokenizer_files
from kvgraph.models.gguf_vocabulary import read_vocabulary
from kvgraph.models.quantized.coded import QuantizedCheckpoint
from kvgraph.models.weights import WeightStream


@dataclass(frozen=True, slots=True)
class GGUFCheckpoint:
    """An opened GGUF file; its weights stay where they are.

    Attributes:
        file: Its header.
        config_json: The content of a config.json that describes the model.
        generation_config: The content of a generation_config.json.
        source: Where it comes from.
    """

    file: GGUFFile
    config_json: dict[str, Any]
    generation_config: dict[str, Any]
    source: CheckpointSource

    @property
    def config(self) -> ModelConfig:
        """What the model is.

        Raises:
            ValueError: See `ModelConfig.from_hf`.
        """
        return ModelConfig.from_hf(self.config_json)

    def weights(self) -> WeightStream:
        """The weights under their Hugging Face names.

        Raises:
            ValueError: Two tensors come under one name.
        """
        weights = hugging_face_weights(self.file, self.config_json)
        return WeightStream(self.file.path, weights, "the metadata")

    def quantized(self) -> QuantizedCheckpoint | None:
        """See `Checkpoint.quantized`: matrices of Q8_0 and Q4_0, under their Hugging Face names.

        Raises:
            ValueError: Two tensors come under one name.
        """
        weights = hugging_face_weights(self.file, self.config_json)
        coded = coded_weights(weights)
        if not coded:
            return None
        types = Counter(tensor.type.name for tensor in self.file.tensors.values())
        plain = {name: weight for name, weight in weights.items() if name not in coded}
        return QuantizedCheckpoint("gguf", {"types": dict(types)}, coded, plain)

    def dtype(self) -> str:
        """See `kvgraph.models.gguf_config.read_dtype`."""
        return str(self.config_json["dtype"])

    @property
    def has_tokenizer(self) -> bool:
        """Whether the file has a vocabulary."""
        return read_vocabulary(self.file) is not None

    def write_tokenizer(self, directory: Path) -> None:
        """Write generation_config.json, tokenizer.json and what goes with it into a directory.

        Raises:
            ValueError: The vocabulary is not complete, or of a kind that is not implemented.
        """
        texts = tokenizer_files(self.file)
        if self.generation_config:
            texts[GENERATION_CONFIG_FILE] = json.dumps(self.generation_config, indent=2)
        for name, text in texts.items():
            (directory / name).write_text(text, encoding="utf-8")

    def files(self) -> dict[str, int]:
        """Name and size of the file, or of every part."""
        paths = dict.fromkeys([self.file.path, *(tensor.file for tensor in self.file.tensors.values())])
        return {path.name: path.stat().st_size for path in paths}

    def digest(self, *, weights: bool = True) -> str:
        """SHA-256 that identifies the file, see `kvgraph.models.digest`; configuration and weights lie in one."""
        return sampled_digest([], self.file.tensors.values())


def open_gguf(path: Path, source: CheckpointSource) -> GGUFCheckpoint:
    """Open a GGUF file, the first one where there are several.

    Raises:
        FileNotFoundError: One of several files is missing.
        ValueError: A file is damaged, or its model is not known.
    """
    file = read_parts(path)
    return GGUFCheckpoint(file, hugging_face_config(file), generation_config(file), source)
