from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvgraph.runtime import resident_weights
from kvgraph.runtime.resident_weights import load_weights


def write(path: Path, arrays: dict[str, np.ndarray], exact: dict[str, int]) -> None:
    """A weights file as the layout is described: padded tensors, and in the metadata the length of packed ones."""
    header: dict[str, object] = {"__metadata__": {name: str(length) for name, length in exact.items()}}
    end = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "U8", "shape": [array.size], "data_offsets": [end, end + array.size]}
        end += array.size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(a.tobytes() for a in arrays.values()))


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        name: rng.integers(0, 256, size, np.uint8) for name, size in (("a", 128), ("norm", 64), ("b", 1000))
    }


def test_packed_weights_are_given_without_their_padding(
    tmp_path: Path, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resident_weights, "_PIECE_BYTES", 300)  # several pieces, by several threads
    write(tmp_path / "weights", arrays, {"a": 100, "b": 1000})
    values = load_weights(tmp_path / "weights")
    assert list(values) == ["a", "b"]
    np.testing.assert_array_equal(values["a"].numpy(), arrays["a"][:100])
    np.testing.assert_array_equal(values["b"].numpy(), arrays["b"])


def test_file_that_is_cut_short_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    path = tmp_path / "weights"
    write(path, arrays, {"a": 100, "b": 1000})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="'b' has 999 bytes, expected 1000; build the target again"):
        load_weights(path)
