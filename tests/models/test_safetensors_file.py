from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvgraph.models.safetensors_file import read_tensors

Header = dict[str, dict[str, Any]]
NAMES = ("embed", "norm", "proj")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A safetensors file of three tensors."""
    path = tmp_path / "model.safetensors"
    save_file({"embed": torch.ones(13, 5), "norm": torch.ones(5), "proj": torch.ones(7, 3).half()}, path)
    return path


def rewrite_header(path: Path, change: Callable[[Header], object]) -> None:
    """Apply `change` to a file's header, keeping its data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    write_raw(path, json.dumps(header).encode(), data[8 + length :])


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_tensors_come_in_the_order_of_the_data(file: Path) -> None:
    stored = list(read_tensors(file).values())
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in stored} == {
        "embed": ("F32", (13, 5)),
        "norm": ("F32", (5,)),
        "proj": ("F16", (7, 3)),
    }
    assert stored[-1].offset + stored[-1].nbytes == file.stat().st_size
    assert [tensor.offset for tensor in stored] == sorted(tensor.offset for tensor in stored)


def test_metadata_is_not_a_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert list(read_tensors(tmp_path / "a.safetensors")) == ["a"]


def test_one_byte_less_is_refused(file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=rf"model.safetensors: .* {size - 1} bytes, its header describes {size}.*cut"
    ):
        read_tensors(file)


def test_bytes_that_no_tensor_owns_are_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="followed by bytes that no tensor owns"):
        read_tensors(file)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10_000])
def test_an_implausible_header_length_is_refused(file: Path, length: int) -> None:
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(ValueError, match=f"header of {length} bytes in a file of"):
        read_tensors(file)


def test_a_header_beyond_the_library_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((100_000_001).to_bytes(8, "little"))
    # Sparse: the length is plausible, the disk stays empty.
    os.truncate(path, 2**28)
    with pytest.raises(ValueError, match=r"header of 100000001 bytes .* expected at most 100000000"):
        read_tensors(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors"):
        read_tensors(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [13, 6]}, r"'embed' occupies 260 bytes, but F32 \[13, 6\] needs 312"),
        ({"dtype": "F16"}, "'embed' occupies 260 bytes, but F16"),
        ({"dtype": "F4"}, "'embed' has dtype 'F4'; known: BOOL"),
        ({"dtype": ["F32"]}, r"'embed' has dtype \['F32'\]"),
        ({"shape": [-13, -5]}, r"'embed' has shape \[-13, -5\]"),
        ({"shape": [13.0, 5]}, r"'embed' has shape \[13.0, 5\]"),
        ({"shape": [True, 65]}, r"'embed' has shape \[True, 65\]"),
        ({"data_offsets": [0]}, r"data_offsets \[0\]"),
        ({"data_offsets": [260, 0]}, "'embed' occupies -260 bytes"),
        ({"data_offsets": [2**62, 2**62 + 260]}, r"the file has \d+ bytes, its header describes 46\d+:"),
        ({"extra": 1}, "expected dtype, shape, data_offsets"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    file: Path, change: dict[str, Any], message: str
) -> None:
    rewrite_header(file, lambda header: header["embed"].update(change))
    with pytest.raises(ValueError, match=message):
        read_tensors(file)


def test_overlapping_tensors_are_refused(file: Path) -> None:
    def overlap(header: Header) -> None:
        header["twin"] = dict(header["embed"])

    rewrite_header(file, overlap)
    with pytest.raises(ValueError, match=r"tensor '(embed|twin)' starts at byte"):
        read_tensors(file)


def test_a_gap_between_tensors_is_refused(file: Path) -> None:
    def drop_the_middle(header: Header) -> None:
        by_offset = sorted(
            (name for name in header if name in NAMES), key=lambda n: header[n]["data_offsets"]
        )
        del header[by_offset[1]]

    rewrite_header(file, drop_the_middle)
    with pytest.raises(ValueError, match=r"starts at byte .*, expected .* where the one before it ends"):
        read_tensors(file)


def test_a_tensor_that_appears_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_raw(tmp_path / "model.safetensors", f'{{"a":{entry},"a":{entry}}}'.encode(), b"\0")
    with pytest.raises(ValueError, match="'a' appears twice"):
        read_tensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b"\xff", b'{"a": 1}', b"[" * 50_000, b'{"a":' + b"9" * 5000 + b"}"]
)
def test_a_header_that_is_not_a_header_is_refused(tmp_path: Path, header: bytes) -> None:
    write_raw(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=r"model.safetensors: "):
        read_tensors(tmp_path / "model.safetensors")
