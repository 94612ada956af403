from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvgraph.models.weights import WeightStream

Header = dict[str, dict[str, Any]]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(13, 5),
        "norm": torch.randn(5).to(torch.bfloat16),
        "proj": torch.randn(7, 3, 2).to(torch.float16),
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


def rewrite_header(path: Path, change: Callable[[Header], object]) -> None:
    """Apply `change` to a file's header, keeping its data."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    write_raw(path, json.dumps(header).encode(), data[8 + length :])


def write_raw(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of one file; the path of the file."""
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_every_tensor_reads_as_the_safetensors_library_reads_it(single: Path) -> None:
    stream, expected = WeightStream(single.parent), load_file(single)
    assert set(stream.names) == set(expected)
    for name, tensor in expected.items():
        spec = stream.spec(name)
        assert (spec.dtype, spec.shape, spec.file) == (tensor.dtype, tuple(tensor.shape), single)
        assert torch.equal(stream.read_rows(name, 0, len(tensor)), tensor)


def test_rows_are_the_rows_asked_for(single: Path) -> None:
    stream, expected = WeightStream(single.parent), tensors()
    assert torch.equal(stream.read_rows("proj", 2, 5), expected["proj"][2:5])
    assert torch.equal(stream.read_rows("norm", 4, 5), expected["norm"][4:])
    assert stream.read_rows("embed", 3, 3).shape == (0, 5)


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    two_shards(tmp_path)
    stream = WeightStream(tmp_path)
    assert set(stream.names) == set(tensors())
    assert stream.spec("proj").file.name == "model-2.safetensors"
    assert torch.equal(stream.read_rows("proj", 0, 7), tensors()["proj"])


def test_a_real_checkpoint_reads_whole(shared_data: Path) -> None:
    directory = shared_data / "stories260k"
    stream = WeightStream(directory)
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(stream.read_rows(name, 0, len(tensor)), tensor)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 14), (5, 4)])
def test_rows_that_are_not_there_are_refused(single: Path, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"rows {start} to {stop} of 'embed', whose shape is \[13, 5\]"):
        WeightStream(single.parent).read_rows("embed", start, stop)


def test_a_name_that_is_not_there_is_refused(single: Path) -> None:
    with pytest.raises(ValueError, match="no weight 'lm_head' among 3"):
        WeightStream(single.parent).spec("lm_head")


def test_integers_have_a_spec_but_are_not_weights(tmp_path: Path) -> None:
    save_file({"packed": torch.zeros(4, 4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    stream = WeightStream(tmp_path)
    assert stream.spec("packed").dtype == torch.uint8
    with pytest.raises(
        ValueError, match="'packed' is stored as uint8, expected one of float32, float16, bfloat16"
    ):
        stream.read_rows("packed", 0, 4)
    with pytest.raises(ValueError, match="'packed' is stored as uint8"):
        stream.check({"packed": (4, 4)})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    table = torch.zeros(9, 33, dtype=dtype)
    table[6, 32] = value
    save_file({"table": table}, tmp_path / "model.safetensors")
    stream = WeightStream(tmp_path)
    assert stream.read_rows("table", 0, 6).shape == (6, 33)
    with pytest.raises(ValueError, match=rf"model.safetensors: weight 'table' holds {value} in row 6"):
        stream.read_rows("table", 2, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_found_wherever_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    # Longer than the vector registers that look for it, and not a multiple of them.
    size = 67
    rows = torch.ones(size, size, dtype=dtype).fill_diagonal_(float("nan"))
    save_file({"rows": rows}, tmp_path / "model.safetensors")
    stream = WeightStream(tmp_path)
    for row in range(size):
        with pytest.raises(ValueError, match=f"holds nan in row {row}$"):
            stream.read_rows("rows", row, row + 1)


def test_the_largest_finite_values_are_weights(tmp_path: Path) -> None:
    limits = {
        str(dtype): torch.tensor([torch.finfo(dtype).min, torch.finfo(dtype).max]).to(dtype)
        for dtype in DTYPES
    }
    save_file(limits, tmp_path / "model.safetensors")
    for name, tensor in limits.items():
        assert torch.equal(WeightStream(tmp_path).read_rows(name, 0, 2), tensor)


EXPECTED = {"embed": (13, 5), "norm": (5,), "proj": (7, 3, 2)}


def test_check_accepts_what_the_model_expects(single: Path) -> None:
    WeightStream(single.parent).check(EXPECTED)
    WeightStream(single.parent).check({"embed": (13, 5)}, dropped={"norm", "proj", "not.there.either"})


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (
            {**EXPECTED, "lm_head": (13, 5), "bias": (5,)},
            "2 weights are missing: lm_head, bias; config.json asks",
        ),
        (
            {"embed": (13, 5), "norm": (5,)},
            "model.safetensors: 1 weights are not expected: proj; the model that",
        ),
        ({**EXPECTED, "embed": (5, 13)}, r"'embed' has shape \[13, 5\], config.json says \[5, 13\]"),
        ({**EXPECTED, "norm": (5, 1)}, r"'norm' has shape \[5\], config.json says \[5, 1\]"),
    ],
)
def test_check_names_what_differs(single: Path, expected: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightStream(single.parent).check(expected)


def test_check_lists_the_first_few_of_many(single: Path) -> None:
    expected = {**EXPECTED, **{f"layer.{i}": (1,) for i in range(80)}}
    with pytest.raises(ValueError, match=r"80 weights are missing: layer.0, .*layer.4, \.\.\.;"):
        WeightStream(single.parent).check(expected)


def test_a_head_of_another_size_shows_in_the_shapes(tmp_path: Path) -> None:
    hidden, heads, head_dim = 20, 4, 8
    save_file({"q_proj.weight": torch.zeros(heads * head_dim, hidden)}, tmp_path / "model.safetensors")
    stream = WeightStream(tmp_path)
    stream.check({"q_proj.weight": (heads * head_dim, hidden)})
    with pytest.raises(
        ValueError, match=r"'q_proj.weight' has shape \[32, 20\], config.json says \[20, 20\]"
    ):
        stream.check({"q_proj.weight": (heads * (hidden // heads), hidden)})


def test_a_deleted_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"names 2 files, of which 1 are missing: model-2.safetensors"
    ):
        WeightStream(tmp_path)


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
        WeightStream(tmp_path)


def test_a_tensor_that_the_index_does_not_list_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["norm"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"does not list 1 tensors, such as 'norm' in .*model-1.safetensors"):
        WeightStream(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards = {"model-1.safetensors": tensors(), "model-2.safetensors": {"embed": torch.zeros(13, 5)}}
    save_shards(tmp_path, shards)
    with pytest.raises(
        ValueError, match=r"'embed' is in both .*model-1.safetensors and .*model-2.safetensors"
    ):
        WeightStream(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[1]", "not json"])
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index.json"):
        WeightStream(tmp_path)


def test_a_stale_single_file_beside_an_index_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has both model.safetensors and model.safetensors.index.json"):
        WeightStream(tmp_path)


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"pickled \(pytorch_model.bin\).* convert them to safetensors"
    ):
        WeightStream(tmp_path)


def test_a_directory_without_weights_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"")
    with pytest.raises(
        FileNotFoundError, match=r"no weights, expected model.safetensors .* found weights.gguf"
    ):
        WeightStream(tmp_path)


def test_one_byte_less_is_refused(single: Path) -> None:
    size = single.stat().st_size
    single.write_bytes(single.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=rf"model.safetensors: .* {size - 1} bytes, its header describes {size}.*cut"
    ):
        WeightStream(single.parent)


def test_bytes_that_no_tensor_owns_are_refused(single: Path) -> None:
    single.write_bytes(single.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="followed by bytes that no tensor owns"):
        WeightStream(single.parent)


def test_a_file_that_shrinks_while_it_is_read_is_refused(single: Path) -> None:
    stream = WeightStream(single.parent)
    single.write_bytes(single.read_bytes()[:-1])
    last = stream.names[-1]
    with pytest.raises(ValueError, match=f"ends inside weight '{last}'"):
        stream.read_rows(last, 0, stream.spec(last).shape[0])


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 10_000])
def test_an_implausible_header_length_is_refused(single: Path, length: int) -> None:
    single.write_bytes(length.to_bytes(8, "little") + single.read_bytes()[8:])
    with pytest.raises(ValueError, match=f"header of {length} bytes in a file of"):
        WeightStream(single.parent)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\0" * 8])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors"):
        WeightStream(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [13, 6]}, r"'embed' occupies 260 bytes, but F32 \[13, 6\] needs 312"),
        ({"dtype": "F16"}, "'embed' occupies 260 bytes, but F16"),
        ({"dtype": "F4"}, "'embed' has dtype 'F4'; known: BOOL"),
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
    single: Path, change: dict[str, Any], message: str
) -> None:
    rewrite_header(single, lambda header: header["embed"].update(change))
    with pytest.raises(ValueError, match=message):
        WeightStream(single.parent)


def test_overlapping_tensors_are_refused(single: Path) -> None:
    def overlap(header: Header) -> None:
        header["twin"] = dict(header["embed"])

    rewrite_header(single, overlap)
    with pytest.raises(ValueError, match=r"tensor '(embed|twin)' starts at byte"):
        WeightStream(single.parent)


def test_a_gap_between_tensors_is_refused(single: Path) -> None:
    def drop_the_middle(header: Header) -> None:
        by_offset = sorted(
            (name for name in header if name in EXPECTED), key=lambda n: header[n]["data_offsets"]
        )
        del header[by_offset[1]]

    rewrite_header(single, drop_the_middle)
    with pytest.raises(ValueError, match=r"starts at byte .*, expected .* where the one before it ends"):
        WeightStream(single.parent)


def test_a_tensor_that_appears_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_raw(tmp_path / "model.safetensors", f'{{"a":{entry},"a":{entry}}}'.encode(), b"\0")
    with pytest.raises(ValueError, match="'a' appears twice"):
        WeightStream(tmp_path)


@pytest.mark.parametrize(
    "header", [b"[]", b"{", b"\xff", b'{"a": 1}', b"[" * 50_000, b'{"a":' + b"9" * 5000 + b"}"]
)
def test_a_header_that_is_not_a_header_is_refused(tmp_path: Path, header: bytes) -> None:
    write_raw(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=r"model.safetensors: "):
        WeightStream(tmp_path)


READ_A_TABLE = """
import resource, sys
from pathlib import Path
from kvgraph.models.weights import WeightStream
stream = WeightStream(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for row in range(0, 65536, 1024):
    stream.read_rows("table", row, row + 1024)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
TABLE_KIB, PIECE_KIB = 65536 * 1024 * 2 // 1024, 1024 * 1024 * 2 // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_memory_follows_the_piece_and_not_the_tensor(tmp_path: Path) -> None:
    save_file({"table": torch.zeros(65536, 1024, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", READ_A_TABLE, str(tmp_path)]
    grown_kib = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    # Two pieces can be alive at once; the rest is what torch allocates on its first operation.
    assert grown_kib < 2 * PIECE_KIB + 16 * 1024 < TABLE_KIB
