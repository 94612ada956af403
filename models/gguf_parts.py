"""A GGUF model in one file or in several, which are named model-00001-of-00003.gguf and so on."""

from __future__ import annotations

import re
from pathlib import Path

from kvgraph.models.gguf_file import GGUFFile, GGUFTensor, read_gguf

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def read_parts(path: Path) -> GGUFFile:
    """The header of a model: the metadata of its first file, the tensors of all.

    Raises:
        FileNotFoundError: One of several files is missing.
        ValueError: A file is damaged or belongs to another model, or `path` is not the first of them.
    """
    first = read_gguf(path)
    if first.metadata.get(COUNT, 1) in (0, 1):
        return first
    tensors: dict[str, GGUFTensor] = dict(first.tensors)
    paths = _part_paths(first)
    for number, part_path in enumerate(paths[1:], start=1):
        part = read_gguf(part_path)
        if (part.metadata.get(NUMBER), part.metadata.get(COUNT)) != (number, len(paths)):
            raise ValueError(f"{part_path}: does not say that it is part {number + 1} of {len(paths)}")
        if repeated := [name for name in part.tensors if name in tensors]:
            raise ValueError(f"{part_path}: tensor {repeated[0]!r} is in {tensors[repeated[0]].file}, too")
        tensors.update(part.tensors)
    expected = first.metadata.get(TENSORS, len(tensors))
    if len(tensors) != expected:
        raise ValueError(f"{path}: {len(tensors)} tensors in {len(paths)} files, expected {expected}")
    return GGUFFile(path, first.metadata, tensors)


def _part_paths(first: GGUFFile) -> list[Path]:
    path, count = first.path, first.metadata[COUNT]
    named = _PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise ValueError(
            f"{path}: is one of {count} files, expected to be named model-00001-of-{count:05}.gguf"
        )
    paths = [
        path.with_name(f"{named['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, int(count) + 1)
    ]
    if first.metadata.get(NUMBER) != 0 or path != paths[0]:
        raise ValueError(f"{path}: is not the first of its {count} files; give {paths[0].name}")
    if missing := [part.name for part in paths if not part.is_file()]:
        raise FileNotFoundError(f"{path}: is one of {count} files; missing: {', '.join(missing)}")
    return paths
