from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from safetensors.torch import save_file

from kvgraph.models.checkpoint import CheckpointSource, open_checkpoint
from kvgraph.models.config import ModelConfig
from kvgraph.models.digest import BLOCK_BYTES

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 20,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def save(directory: Path, config: dict[str, Any] = CONFIG, **tensors: torch.Tensor) -> Path:
    """Write a small checkpoint; returns its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors or {"w": torch.arange(6.0).reshape(2, 3)}, directory / "model.safetensors")
    return directory


def test_a_directory_opens(tmp_path: Path) -> None:
    (save(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.directory == tmp_path
    assert checkpoint.source == CheckpointSource("directory", str(tmp_path), None)
    assert checkpoint.config_json == CONFIG
    assert checkpoint.generation_config == {"eos_token_id": [2, 7]}
    assert checkpoint.config == ModelConfig.from_hf(CONFIG)
    assert checkpoint.weights().names == ("w",)


def test_a_real_checkpoint_opens(shared_data: Path) -> None:
    checkpoint = open_checkpoint(shared_data / "stories260k")
    assert checkpoint.config.vocab_size == 512
    assert checkpoint.dtype() == "float32"
    assert [file.name for file in checkpoint.tokenizer_files()] == [
        "tokenizer.json",
        "generation_config.json",
    ]


def test_a_bare_config_has_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "shape-of-70b.json"
    path.write_text(json.dumps({**CONFIG, "dtype": "bfloat16"}))
    checkpoint = open_checkpoint(path)
    assert checkpoint.source == CheckpointSource("config", str(path), None)
    assert (checkpoint.config.num_hidden_layers, checkpoint.dtype()) == (2, "bfloat16")
    assert (checkpoint.generation_config, checkpoint.tokenizer_files()) == ({}, [])
    with pytest.raises(ValueError, match=r"shape-of-70b.json is a configuration alone"):
        checkpoint.weights()


def test_a_directory_without_weights_opens_until_they_are_needed(tmp_path: Path) -> None:
    (save(tmp_path) / "model.safetensors").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.head_dim == 8
    assert len(checkpoint.digest(weights=False)) == 64
    with pytest.raises(FileNotFoundError, match="no weights"):
        checkpoint.weights()


@pytest.mark.parametrize(
    ("said", "stored", "dtype"),
    [
        ({"torch_dtype": "float16"}, torch.float32, "float16"),
        ({}, torch.bfloat16, "bfloat16"),
        ({"dtype": None}, torch.float16, "float16"),
    ],
)
def test_an_unsaid_dtype_is_that_of_the_weights(
    tmp_path: Path, said: dict[str, Any], stored: torch.dtype, dtype: str
) -> None:
    save(tmp_path, {**CONFIG, **said}, w=torch.zeros(2, dtype=stored))
    assert open_checkpoint(tmp_path).dtype() == dtype


def test_a_dtype_that_nothing_says_is_an_error(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ValueError, match="dtype is missing"):
        open_checkpoint(tmp_path / "config.json").dtype()


def test_a_tokenizer_is_carried_with_what_belongs_to_it(tmp_path: Path) -> None:
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
    for name in [*names, "tokenizer.model", "README.md"]:
        (save(tmp_path) / name).write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.has_tokenizer
    assert checkpoint.tokenizer_files() == [tmp_path / name for name in names]


@pytest.mark.parametrize("vocabulary", [["tokenizer.model"], ["vocab.json", "merges.txt"]])
def test_another_kind_of_tokenizer_is_not_carried(tmp_path: Path, vocabulary: list[str]) -> None:
    for name in [*vocabulary, "tokenizer_config.json", "generation_config.json"]:
        (save(tmp_path) / name).write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.has_tokenizer
    assert checkpoint.tokenizer_files() == [tmp_path / "generation_config.json"]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"a": 1, "a": 2}', "\x00", '{"a": '])
def test_a_malformed_json_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (save(tmp_path) / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{tmp_path / name}: "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name", ["./models/x", "../x", "/no/where", "a/b/c", "x/config.json", "m.gguf", "~/m", "m/"]
)
def test_a_path_that_does_not_exist_never_reaches_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"no such directory: {name}"):
        open_checkpoint(name)
    with pytest.raises(FileNotFoundError, match="no such directory"):
        open_checkpoint(tmp_path / "owner")


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config.json; expected a Hugging Face checkpoint"):
        open_checkpoint(tmp_path)


def test_a_weights_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a file; give the directory of a checkpoint"):
        open_checkpoint(save(tmp_path) / "model.safetensors")


def test_a_revision_of_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="revision 'main' is for hub checkpoints"):
        open_checkpoint(save(tmp_path), "main")


class Hub:
    """Stands for huggingface_hub.snapshot_download and remembers what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[tuple[str, str | None, list[str]]] = []

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.calls.append((repo_id, revision, allow_patterns))
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(save(tmp_path / "models--owner--name" / "snapshots" / COMMIT))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.chdir(tmp_path)
    return fake


def test_a_hub_checkpoint_is_pinned_to_its_commit(hub: Hub) -> None:
    checkpoint = open_checkpoint("owner/name", "main")
    assert checkpoint.source == CheckpointSource("hub", "owner/name", COMMIT)
    assert checkpoint.directory == hub.folder
    assert checkpoint.weights().names == ("w",)
    assert hub.calls[0][:2] == ("owner/name", "main")


@pytest.mark.parametrize(
    ("weights", "fetched"), [(True, {"model.safetensors", "model-*.safetensors"}), (False, set())]
)
def test_only_what_a_checkpoint_needs_is_fetched(hub: Hub, weights: bool, fetched: set[str]) -> None:
    open_checkpoint("owner/name", weights=weights)
    patterns = set(hub.calls[0][2])
    assert {"config.json", "generation_config.json", "tokenizer*", "model.safetensors.index.json"} <= patterns
    assert {pattern for pattern in patterns if pattern.endswith(".safetensors")} == fetched
    assert not any(pattern in ("*", "*.bin") for pattern in patterns)


def failures() -> list[Exception]:
    # The transport error of the HTTP library is not an OSError in every version.
    transport = HfHubHTTPError.__bases__[0]
    return [
        FileNotFoundError("no cached snapshot\n\nCheck your connection."),
        ConnectionError("refused"),
        ValueError("bad name"),
        transport("timed out"),
    ]


@pytest.mark.parametrize("failure", failures(), ids=lambda failure: type(failure).__name__)
def test_a_failed_fetch_is_one_clear_line(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        OSError, match=r"'owner/name' is not a directory, .* at revision 'v1' from the hub"
    ) as caught:
        open_checkpoint("owner/name", "v1")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("give the directory of a checkpoint")


@pytest.mark.parametrize("network", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_a_network_the_real_client_fails_at_once(network: dict[str, str], tmp_path: Path) -> None:
    code = "from kvgraph.models.checkpoint import open_checkpoint; open_checkpoint('owner/name')"
    environment = {**os.environ, **network, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1].startswith(
        "OSError: 'owner/name' is not a directory, and fetching it from"
    )


def digest(directory: Path) -> str:
    return open_checkpoint(directory).digest()


def test_the_digest_does_not_depend_on_place_or_time(tmp_path: Path) -> None:
    first, second = save(tmp_path / "a"), save(tmp_path / "b")
    os.utime(second / "model.safetensors", (0, 0))
    assert digest(first) == digest(second)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_the_digest_covers_every_small_file(tmp_path: Path, name: str) -> None:
    (save(tmp_path) / "tokenizer.json").write_text("{}")
    before = digest(tmp_path)
    (tmp_path / name).write_text(json.dumps({**CONFIG, "vocab_size": 98}))
    assert digest(tmp_path) != before


@pytest.mark.parametrize("element", [0, 1, 5])
def test_the_digest_covers_every_byte_of_a_small_tensor(tmp_path: Path, element: int) -> None:
    before = digest(save(tmp_path))
    changed = torch.arange(6.0)
    changed[element] += 1
    assert digest(save(tmp_path, w=changed.reshape(2, 3))) != before


def test_the_digest_covers_names(tmp_path: Path) -> None:
    before = digest(save(tmp_path))
    assert digest(save(tmp_path, v=torch.arange(6.0).reshape(2, 3))) != before


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_the_digest_samples_a_large_tensor(tmp_path: Path, place: str) -> None:
    size = 4 * BLOCK_BYTES
    table = torch.zeros(size, dtype=torch.float16)
    before = digest(save(tmp_path, w=table))
    table[{"first": 0, "middle": size // 2, "last": size - 1}[place]] = 1
    assert digest(save(tmp_path, w=table)) != before
