from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvgraph.models.shards import stored_tensors


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(13, 5),
        "norm": torch.randn(5),
        "proj": torch.randn(7, 3),
    }


def save_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]], **weight_map: str) -> None:
    """Write files and an index that lists them as they are, with changes from `weight_map`."""
    listed = {name: file for file, content in shards.items() for name in content}
    for file, content in shards.items():
        save_file(content, directory / file)
    index = {"metadata": {}, "weight_map": {**listed, **weight_map}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def two_shards(directory: Path, **weight_map: str) -> None:
    content = tensors()
    last = {"proj": content.pop("proj")}
    save_shards(directory, {"model-1.safetensors": content, "model-2.safetensors": last}, **weight_map)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    two_shards(tmp_path)
    stored = stored_tensors(tmp_path)
    assert {name: tensor.file.name for name, tensor in stored.items()} == {
        "embed": "model-1.safetensors",
        "norm": "model-1.safetensors",
        "proj": "model-2.safetensors",
    }


def test_an_index_may_list_one_file(tmp_path: Path) -> None:
    save_shards(tmp_path, {"model.safetensors": tensors()})
    assert set(stored_tensors(tmp_path)) == set(tensors())


def test_a_deleted_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"names 2 files; missing: model-2.safetensors; download"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {"gone": "model-1.safetensors"},
            "tensor 'gone' should be in model-1.safetensors, which does not hold it",
        ),
        (
            {"embed": "model-2.safetensors"},
            "'embed' should be in model-2.safetensors but is in model-1.safetensors",
        ),
        ({"embed": "../model-1.safetensors"}, "expected the name of a safetensors file beside it"),
        ({"embed": ".."}, "expected the name of a safetensors file beside it"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(
    tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    two_shards(tmp_path, **weight_map)
    with pytest.raises(ValueError, match=message):
        stored_tensors(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["norm"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"does not list a tensor, 'norm' in .*model-1.safetensors"):
        stored_tensors(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": tensors(), "model-2.safetensors": {"embed": torch.zeros(13, 5)}}
    save_shards(tmp_path, shards)
    with pytest.raises(
        ValueError, match=r"'embed' is in both .*model-1.safetensors and .*model-2.safetensors"
    ):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[1]", "not json"])
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index.json"):
        stored_tensors(tmp_path)


def test_a_stale_single_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has both model.safetensors and model.safetensors.index.json"):
        stored_tensors(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"pickled \(pytorch_model.bin\).* convert them to safetensors"
    ):
        stored_tensors(tmp_path)


def test_a_directory_without_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"no weights, expected model.safetensors .* found weights.gguf"
    ):
        stored_tensors(tmp_path)
