"""Tensors of GGUF files against the gguf package's own dequantization; conversions undone, against their formulas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from kvgraph.models import gguf_weights
from kvgraph.models.gguf_file import GGUFTensor, read_gguf
from kvgraph.models.gguf_weights import QUANTIZED_TYPES, GGUFWeight, HeadsInHalves, LessOne, Transposed
from kvgraph.models.weights import StoredWeight, WeightStream

FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
KINDS = [*FLOATS, *QUANTIZED_TYPES]


def write(path: Path, stored: NDArray[np.generic], kind: Kind) -> GGUFTensor:
    """A file with this one tensor, of bytes where `kind` is quantized."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path).tensors["w"]


def random_blocks(kind: Kind, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Bytes [..., n] of a tensor of this shape, of whatever blocks stand for finite values."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count, rng = int(np.prod(shape)) // block, np.random.default_rng(0)
    found = np.empty((0, block_bytes), dtype=np.uint8)
    while len(found) < count:
        candidates = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            finite = np.isfinite(gguf.dequantize(candidates, kind)).all(axis=-1)
        found = np.concatenate([found, candidates[finite]])
    return found[:count].reshape(*shape[:-1], shape[-1] // block * block_bytes)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float32).view(torch.int32)


@pytest.mark.parametrize("shape", [(9, 512), (3, 4, 256)])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_are_those_of_the_gguf_package(kind: Kind, shape: tuple[int, ...], tmp_path: Path) -> None:
    blocks = random_blocks(kind, shape)
    weight = GGUFWeight(write(tmp_path / "w.gguf", blocks, kind))
    expected = torch.from_numpy(gguf.dequantize(blocks, kind).copy()).view(shape)
    stream = WeightStream(tmp_path / "w.gguf", {"w": weight})
    assert (stream.spec("w").dtype, stream.spec("w").shape) == (FLOATS.get(kind, torch.float32), shape)
    assert torch.equal(bits(stream.read_rows("w", 0, shape[0])), bits(expected))
    assert torch.equal(bits(stream.read_rows("w", 1, 3)), bits(expected[1:3]))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q6_K], ids=lambda kind: kind.name)
def test_pieces_make_the_whole(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = GGUFWeight(write(tmp_path / "w.gguf", random_blocks(kind, (11, 256)), kind))
    whole = weight.read_rows(0, 11)
    for pieces in (1, 1000):
        monkeypatch.setattr(gguf_weights, "PIECE_BYTES", pieces)
        assert torch.equal(weight.read_rows(0, 11), whole)
        assert torch.equal(weight.read_rows(4, 10), whole[4:10])


def test_a_value_that_is_not_finite_is_named(tmp_path: Path) -> None:
    blocks = gguf.quantize(np.ones((6, 64), dtype=np.float32), Kind.Q8_0)
    blocks[4, 34:36] = np.array([np.nan], dtype=np.float16).view(np.uint8)
    weight = GGUFWeight(write(tmp_path / "bad.gguf", blocks, Kind.Q8_0))
    with pytest.raises(ValueError, match=r"bad.gguf: weight 'w' holds nan in row 4"):
        WeightStream(tmp_path / "bad.gguf", {"hugging.face.name": weight}).read_rows(
            "hugging.face.name", 2, 6
        )


@pytest.mark.parametrize(
    ("stored", "kind"),
    [
        (np.zeros((2, 4), dtype=np.int32), Kind.I32),
        (np.zeros((2, 4), dtype=np.float64), Kind.F64),
        (np.zeros(34, dtype=np.uint8), Kind.Q8_0),
    ],
    ids=["integers", "float64", "a quantized vector"],
)
def test_what_is_no_weight_is_named(stored: NDArray[np.generic], kind: Kind, tmp_path: Path) -> None:
    weight = GGUFWeight(write(tmp_path / "odd.gguf", stored, kind))
    with pytest.raises(
        ValueError, match=rf"odd.gguf: tensor 'w' of shape .* has type {kind.name}; known are F32"
    ):
        WeightStream(tmp_path / "odd.gguf", {"w": weight}).check({"w": (2, 4)})


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    weight = GGUFWeight(write(path, np.ones((4, 8), dtype=np.float32), Kind.F32))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"w.gguf: ends inside weight 'w'"):
        weight.read_rows(0, 4)


def stored(tmp_path: Path, values: NDArray[np.float32]) -> StoredWeight:
    return GGUFWeight(write(tmp_path / "w.gguf", values, Kind.F32))


@pytest.mark.parametrize("shape", [(12, 5), (12,)], ids=["matrix", "bias"])
def test_pairs_beside_each_other_become_two_halves(shape: tuple[int, ...], tmp_path: Path) -> None:
    # Two heads of three pairs, whose rows llama.cpp orders (pair, which of the two).
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    weight = HeadsInHalves(stored(tmp_path, values), 2)
    expected = values[[0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]]
    assert np.array_equal(weight.read_rows(0, 12).numpy(), expected)
    for start in range(12):
        for stop in range(start, 13):
            assert np.array_equal(weight.read_rows(start, stop).numpy(), expected[start:stop])


def test_a_matrix_is_turned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal((7, 11)).astype(np.float32)
    weight = Transposed(stored(tmp_path, values))
    assert weight.spec.shape == (11, 7)
    for pieces in (1 << 20, 100):
        monkeypatch.setattr(gguf_weights, "PIECE_BYTES", pieces)
        assert np.array_equal(weight.read_rows(0, 11).numpy(), values.T)
        assert np.array_equal(weight.read_rows(3, 8).numpy(), values.T[3:8])


def test_a_norm_gets_its_one_back_without_loss(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    norm = np.concatenate([rng.standard_normal(4000) * scale for scale in (1e-3, 0.3, 3, 40)]).astype(
        np.float32
    )
    plus_one = norm + np.float32(1)
    weight = LessOne(stored(tmp_path, plus_one)).read_rows(0, len(norm))
    assert np.array_equal((weight + 1).numpy(), plus_one)


READ_A_TABLE = """
import sys
from pathlib import Path
from kvgraph.models.gguf_file import read_gguf
from kvgraph.models.gguf_weights import GGUFWeight

def peak_kib():
    # Not getrusage: a child starts with the peak of the process that started it.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])

weight = GGUFWeight(read_gguf(Path(sys.argv[1])).tensors["w"])
weight.read_rows(0, 512)
before = peak_kib()
for row in range(0, 65536, 512):
    weight.read_rows(row, row + 512)
print(peak_kib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_follows_the_piece_and_not_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    tensor = write(path, np.zeros((65536, 544), dtype=np.uint8), Kind.Q8_0)
    command = [sys.executable, "-c", READ_A_TABLE, str(path)]
    grown_kib = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown_kib < 8 * 1024 < tensor.nbytes // 1024
