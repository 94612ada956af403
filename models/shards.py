"""Which safetensors files hold the weights of a checkpoint directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvgraph.models.safetensors_file import StoredTensor, read_tensors
from kvgraph.models.strict_json import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Formats that are recognized only to say how to get away from them.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in name order.

    Raises:
        FileNotFoundError: There are none, or the index names one that is not there.
        ValueError: The index is malformed, or there is both a single file and an index of others.
    """
    index = directory / INDEX_FILE
    single = directory / SINGLE_FILE
    if not index.is_file():
        if not single.is_file():
            raise FileNotFoundError(_nothing_to_read(directory))
        return [single]
    files = sorted({directory / shard for shard in read_index(index).values()})
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(
            f"{index}: names {len(files)} files; missing: {_first_few(missing)}; download the checkpoint again"
        )
    if single.is_file() and single not in files:
        raise ValueError(
            f"{directory}: has both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date"
        )
    return files


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every weight of a checkpoint, with the file that holds it.

    Raises:
        FileNotFoundError: See `weight_files`.
        ValueError: A file is damaged, holds a tensor of another file, or does not agree with the index.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(directory):
        for name, tensor in read_tensors(file).items():
            if name in tensors:
                raise ValueError(
                    f"tensor {name!r} is in both {tensors[name].file} and {file}; one is a leftover"
                )
            tensors[name] = tensor
    index = directory / INDEX_FILE
    if index.is_file():
        _compare_with_index(index, tensors)
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name of an index.

    Raises:
        ValueError: It is malformed, or names a file outside the checkpoint.
    """
    weight_map: Any = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map is {weight_map!r}, expected tensor names and their files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{path}: tensor {name!r} is in {shard!r}, expected the name of a safetensors file beside it"
            )
    return weight_map


def _compare_with_index(index: Path, tensors: dict[str, StoredTensor]) -> None:
    weight_map = read_index(index)
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{index}: tensor {name!r} should be in {shard}, which does not hold it")
        if tensors[name].file.name != shard:
            raise ValueError(
                f"{index}: tensor {name!r} should be in {shard} but is in {tensors[name].file.name}"
            )
    if extra := [name for name in tensors if name not in weight_map]:
        where = tensors[extra[0]].file
        many = "a tensor," if len(extra) == 1 else f"{len(extra)} tensors, such as"
        raise ValueError(f"{index}: does not list {many} {extra[0]!r} in {where}")


def _nothing_to_read(directory: Path) -> str:
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        return (
            f"{directory}: the weights are pickled ({_first_few(pickles)}), which is never loaded because it can run "
            "code; convert them to safetensors, for example with transformers' save_pretrained"
        )
    found = [name for name in names if name.endswith((".safetensors", ".gguf"))]
    return f"{directory}: no weights, expected {SINGLE_FILE} or {INDEX_FILE}; found {_first_few(found) or 'neither'}"


def _first_few(names: list[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
