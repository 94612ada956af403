"""Headers of GGUF files as the gguf package writes and reads them, and files that are damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from kvgraph.models.gguf_file import read_gguf
from kvgraph.models.gguf_parts import read_parts

ALIGNMENT = 32


def write(path: Path, alignment: int | None = None, **splits: int) -> Path:
    """A file with an entry of every type and a few tensors; returns its path."""
    writer = gguf.GGUFWriter(path, "llama", **splits)
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, value in {
        "uint8": 255,
        "int8": -128,
        "uint16": 65535,
        "int16": -32768,
        "uint32": 2**32 - 1,
    }.items():
        getattr(writer, f"add_{name}")(f"an.{name}", value)
    for name, value in {"int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63)}.items():
        getattr(writer, f"add_{name}")(f"an.{name}", value)
    writer.add_float32("a.float32", 1e-5)
    writer.add_float64("a.float64", 1e-5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "▁日本")
    writer.add_array("an.array.of.strings", ["", "a", "▁b"])
    writer.add_array("an.array.of.ints", [3, -4, 5])
    writer.add_array("an.array.of.floats", [0.5, -1000.0])
    writer.add_array("an.array.of.bools", [True, False])
    rng = np.random.default_rng(0)
    for name, shape in {"vector": (5,), "matrix": (3, 7), "stack": (2, 3, 4)}.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    packed = gguf.quantize(rng.standard_normal((4, 64)).astype(np.float32), Kind.Q4_0)
    writer.add_tensor("quantized", packed, raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "whole.gguf")


def test_metadata_is_read_as_it_was_written(whole: Path) -> None:
    metadata = read_gguf(whole).metadata
    for key, field in gguf.GGUFReader(whole).fields.items():
        if key.startswith("an.") or key == "a.string":
            assert metadata[key] == field.contents()
    assert (metadata["a.bool"], metadata["an.array.of.bools"]) == (True, [True, False])
    assert type(metadata["an.uint8"]) is int


def test_a_float_is_the_decimal_that_was_rounded_to_it(whole: Path) -> None:
    metadata = read_gguf(whole).metadata
    assert (metadata["a.float32"], metadata["a.float64"]) == (1e-5, 1e-5)
    assert metadata["an.array.of.floats"] == [0.5, -1000.0]


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_tensors_lie_where_the_gguf_package_finds_them(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "aligned.gguf", alignment)
    tensors = read_gguf(path).tensors
    assert list(tensors) == ["vector", "matrix", "stack", "quantized"]
    for expected in gguf.GGUFReader(path).tensors:
        tensor = tensors[expected.name]
        assert (tensor.offset, tensor.nbytes) == (expected.data_offset, expected.n_bytes)
        assert (tensor.type, tensor.shape) == (expected.tensor_type, tuple(expected.shape[::-1].tolist()))


def test_a_file_that_is_cut_anywhere_is_refused(whole: Path) -> None:
    content = whole.read_bytes()
    last = read_gguf(whole).tensors["quantized"]
    for size in range(0, last.offset + last.nbytes, 3):
        whole.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"whole.gguf: .*(cut short|damaged)"):
            read_gguf(whole)


# Offsets of the version, of the number of tensors and of the number of entries.
VERSION, TENSOR_COUNT, ENTRY_COUNT = 4, 8, 16


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "does not begin with 'GGUF'"),
        (VERSION, struct.pack("<I", 1), "GGUF version 1, expected 2 or 3"),
        (VERSION, struct.pack(">I", 3), "is a big-endian GGUF file"),
        (TENSOR_COUNT, struct.pack("<Q", 2**63), "tensor '' has 0 dimensions"),
        (ENTRY_COUNT, struct.pack("<Q", 2**63), "damaged header|cut short"),
        (
            ENTRY_COUNT + 8,
            struct.pack("<Q", 2**63),
            "the header asks for 9223372036854775808 bytes at byte 32",
        ),
    ],
)
def test_a_damaged_beginning_is_named(whole: Path, offset: int, value: bytes, message: str) -> None:
    content = bytearray(whole.read_bytes())
    content[offset : offset + len(value)] = value
    whole.write_bytes(content)
    with pytest.raises(ValueError, match=rf"whole.gguf: .*({message})"):
        read_gguf(whole)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def described(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A tensor's entry in the header."""
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return string(name) + dimensions + struct.pack("<IQ", kind, offset)


def write_raw(path: Path, *, entries: list[bytes] = [], tensors: list[bytes] = [], data: int = 256) -> Path:  # noqa: B006
    preamble = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    header = preamble + b"".join(entries) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % ALIGNMENT + data))
    return path


ENTRIES = {
    "metadata 'k' appears twice": [string("k") + struct.pack("<IB", 0, 1)] * 2,
    "metadata 'k' has type 13, which is not known": [string("k") + struct.pack("<I", 13)],
    "metadata 'k' has type 9, which is not known": [string("k") + struct.pack("<IIQ", 9, 9, 1)],
    "the string at byte 37 is not UTF-8": [string("k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe"],
    "general.alignment is 24, expected a power of two": [
        string("general.alignment") + struct.pack("<II", 4, 24)
    ],
    "general.alignment is 0, expected": [string("general.alignment") + struct.pack("<II", 4, 0)],
    "the header asks for 36893488147419103232 bytes": [string("k") + struct.pack("<IIQ", 9, 10, 2**62)],
}
TENSORS = {
    "tensor 'w' has 5 dimensions, expected 1 to 4": [described("w", (1,) * 5, 0, 0)],
    "tensor 'w' has 0 dimensions": [described("w", (), 0, 0)],
    "tensor 'w' has type 77, which is not known": [described("w", (4,), 77, 0)],
    r"tensor 'w' has shape \[0, 4\]": [described("w", (0, 4), 0, 0)],
    r"tensor 'w' has shape \[2, 48\], expected rows of a multiple of 32": [
        described("w", (2, 48), Kind.Q4_0, 0)
    ],
    "tensor 'w' ends at byte .*, but the file has": [described("w", (2**40, 2**10), 0, 0)],
    "tensor 'w' starts at byte .*, expected a multiple of 32": [described("w", (4,), 0, 16)],
    "tensor 'v' starts at byte .* not before": [described("w", (9,), 0, 0), described("v", (9,), 0, 32)],
    "tensor 'w' appears twice": [described("w", (4,), 0, 0), described("w", (4,), 0, 32)],
}


@pytest.mark.parametrize("message", ENTRIES)
def test_a_malformed_entry_is_named(tmp_path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=f"raw.gguf: .*{message}"):
        read_gguf(write_raw(tmp_path / "raw.gguf", entries=ENTRIES[message]))


@pytest.mark.parametrize("message", TENSORS)
def test_a_malformed_tensor_is_named(tmp_path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=f"raw.gguf: .*{message}"):
        read_gguf(write_raw(tmp_path / "raw.gguf", tensors=TENSORS[message]))


def test_a_model_in_several_files_is_one(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", split_max_tensors=2)
    single = read_gguf(write(tmp_path / "whole.gguf"))
    parts = read_parts(tmp_path / "model-00001-of-00002.gguf")
    assert {name: tensor.shape for name, tensor in parts.tensors.items()} == {
        name: tensor.shape for name, tensor in single.tensors.items()
    }
    assert {tensor.file.name for tensor in parts.tensors.values()} == {
        "model-00001-of-00002.gguf",
        "model-00002-of-00002.gguf",
    }
    assert parts.metadata.items() >= single.metadata.items()


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, Path]:
    write(tmp_path / "model.gguf", split_max_tensors=2)
    return tmp_path / "model-00001-of-00002.gguf", tmp_path / "model-00002-of-00002.gguf"


def test_a_missing_part_is_named(parts: tuple[Path, Path]) -> None:
    parts[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"is one of 2 files; missing: model-00002-of-00002.gguf"):
        read_parts(parts[0])


def test_the_first_part_is_asked_for(parts: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"is not the first of its 2 files; give model-00001-of-00002.gguf"):
        read_parts(parts[1])


def test_a_renamed_part_is_refused(parts: tuple[Path, Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    with pytest.raises(ValueError, match=r"model.gguf: is one of 2 files, expected to be named"):
        read_parts(renamed)


def test_a_part_of_another_model_is_refused(parts: tuple[Path, Path]) -> None:
    parts[1].write_bytes(parts[0].read_bytes())
    with pytest.raises(ValueError, match=r"00002.gguf: does not say that it is part 2 of 2"):
        read_parts(parts[0])
