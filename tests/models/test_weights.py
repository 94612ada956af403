from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvgraph.models.weights import WeightStream

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed": torch.randn(13, 5),
        "norm": torch.randn(5).to(torch.bfloat16),
        "proj": torch.randn(7, 3, 2).to(torch.float16),
    }


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
            "model.safetensors: 1 weight is not expected: proj; the model that",
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


def test_a_file_that_shrinks_while_it_is_read_is_refused(single: Path) -> None:
    stream = WeightStream(single.parent)
    single.write_bytes(single.read_bytes()[:-1])
    last = stream.names[-1]
    with pytest.raises(ValueError, match=f"ends inside weight '{last}'"):
        stream.read_rows(last, 0, stream.spec(last).shape[0])


READ_A_TABLE = """
import sys
from pathlib import Path
from kvgraph.models.weights import WeightStream

def peak_kib():
    # Not getrusage: a child starts with the peak of the process that started it.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])

stream = WeightStream(Path(sys.argv[1]))
before = peak_kib()
for row in range(0, 65536, 1024):
    stream.read_rows("table", row, row + 1024)
print(peak_kib() - before)
"""
TABLE_KIB, PIECE_KIB = 65536 * 2, 1024 * 2


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_follows_the_piece_and_not_the_tensor(tmp_path: Path) -> None:
    save_file({"table": torch.zeros(65536, 1024, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", READ_A_TABLE, str(tmp_path)]
    grown_kib = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    # Two pieces can be alive at once; the rest is what torch allocates on its first operation.
    assert grown_kib < 2 * PIECE_KIB + 16 * 1024 < TABLE_KIB
