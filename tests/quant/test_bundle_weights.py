"""Reading a bundle's weights as NumPy arrays, against the safetensors library and ml_dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.torch import load_file

from kvgraph.export.bundle import Bundle, FileEntry
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightsWriter, plan_layout
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.formats import pack

RNG = np.random.default_rng(3)
ARRAYS = {
    "float32": RNG.standard_normal((6, 5)).astype(np.float32),
    "float16": RNG.standard_normal((3, 2, 2)).astype(np.float16),
    "bfloat16": RNG.standard_normal((4, 6)).astype(ml_dtypes.bfloat16),
    "float8_e4m3fn": RNG.standard_normal((4, 3)).astype(ml_dtypes.float8_e4m3fn),
    "int8": RNG.integers(-128, 128, (5, 7)).astype(np.int8),
    "int4": RNG.integers(-8, 8, (3, 5)).astype(ml_dtypes.int4),
    "uint4": RNG.integers(0, 16, (4, 4)).astype(ml_dtypes.uint4),
    "float4_e2m1": RNG.standard_normal((4, 2)).astype(ml_dtypes.float4_e2m1fn),
    "int64": np.array(11),
}
BITS = {"int4": 4, "uint4": 4, "float4_e2m1": 4}


@pytest.fixture
def bundle(tmp_path: Path, exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    """A bundle's description over a file of `ARRAYS`."""
    specs = {name: (name, array.shape) for name, array in ARRAYS.items()}
    layout = plan_layout(specs)
    with WeightsWriter(tmp_path / WEIGHTS_FILE, layout) as writer:
        for name, array in ARRAYS.items():
            octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            writer.write(name, (pack(array, 4) if name in BITS else octets).data)
        writer.finish()
    weights = {name: {"dtype": name, "shape": list(array.shape)} for name, array in ARRAYS.items()}
    files = {WEIGHTS_FILE: FileEntry(layout.size, "")}
    return replace(exported(tiny_llama()), path=tmp_path, weights=weights, files=files)


@pytest.mark.parametrize("name", ARRAYS)
def test_reads_every_type(bundle: Bundle, name: str) -> None:
    with BundleWeights(bundle) as weights:
        found = weights.read(name)
    np.testing.assert_array_equal(found.astype(np.float64), ARRAYS[name].astype(np.float64))
    assert found.dtype == ARRAYS[name].dtype


@pytest.mark.parametrize("name", [name for name, array in ARRAYS.items() if array.ndim > 1])
def test_reads_part_of_the_first_axis(bundle: Bundle, name: str) -> None:
    start = 2
    with BundleWeights(bundle) as weights:
        found = weights.read(name, start, 3)
    np.testing.assert_array_equal(found.astype(np.float64), ARRAYS[name][start:3].astype(np.float64))


def test_reads_columns(bundle: Bundle) -> None:
    with BundleWeights(bundle) as weights:
        found = weights.read_columns("bfloat16", 1, 4)
        assert weights.read_columns("bfloat16", 0, 6).shape == (4, 6)
    np.testing.assert_array_equal(found.astype(np.float32), ARRAYS["bfloat16"][:, 1:4].astype(np.float32))


def test_agrees_with_the_safetensors_library(bundle: Bundle) -> None:
    loaded = load_file(bundle.path / WEIGHTS_FILE)
    with BundleWeights(bundle) as weights:
        for name in ("float32", "float16", "int8", "int64"):
            np.testing.assert_array_equal(weights.read(name), loaded[name].numpy())


def test_part_of_a_packed_tensor_begins_with_a_byte(bundle: Bundle) -> None:
    with BundleWeights(bundle) as weights, pytest.raises(ValueError, match="element 5 of 'int4'"):
        weights.read("int4", 1, 2)


def test_unknown_tensor_is_an_error(bundle: Bundle) -> None:
    with BundleWeights(bundle) as weights, pytest.raises(ValueError, match="holds no tensor 'x'"):
        weights.read("x")


def test_bundle_without_weights_is_an_error(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="without --no-weights"):
        BundleWeights(replace(bundle, files={}))


def test_file_that_lacks_a_tensor_is_an_error(bundle: Bundle) -> None:
    listed = {**bundle.weights, "more": {"dtype": "int8", "shape": [2]}}
    with pytest.raises(ValueError, match="does not hold 'more'"):
        BundleWeights(replace(bundle, weights=listed))


def test_tensor_of_another_size_is_an_error(bundle: Bundle) -> None:
    listed = {**bundle.weights, "int8": {"dtype": "int8", "shape": [5, 8]}}
    with pytest.raises(ValueError, match=r"'int8' has bytes \d+ to \d+, bundle.json asks for 40"):
        BundleWeights(replace(bundle, weights=listed))


def test_damaged_header_is_an_error(bundle: Bundle) -> None:
    file = bundle.path / WEIGHTS_FILE
    content = bytearray(file.read_bytes())
    content[8:12] = b"}}}}"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        BundleWeights(bundle)
