"""`kvgraph build --target ort-cpu --cache-dtype float16`: float caches of half the size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import past_key
from kvgraph.export.targets.ort_cpu import build_ort_cpu
from kvgraph.runtime.kernels import library_path
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

pytestmark = pytest.mark.skipif(
    library_path() is None, reason="kvgraph's CPU kernels are not compiled in this installation"
)

# Keys and values of 11 bits move logits of up to 3 by some thousandths.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def llama(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    return exported(tiny_llama(), dtype="float32")


def test_keeps_keys_and_values_as_float16(
    llama: Bundle, ragged: Callable[..., Floats], random_ids: Callable[..., Ids]
) -> None:
    target = build_ort_cpu(llama, cache_dtype="float16")
    assert {(tensor.form, tensor.dtype) for tensor in target.contract.state} == {("scatter", "float16")}
    ids = random_ids(2, 16)
    found = ragged(open_session(llama, "ort-cpu", threads=1), ids, [9, 4], 6)
    expected = ragged(OrtSession(llama, threads=1), ids, [9, 4], 6)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert not np.array_equal(found, expected)


def test_the_cache_holds_the_float32_one_rounded(llama: Bundle) -> None:
    caches = []
    for dtype in ("float32", "float16"):
        build_ort_cpu(llama, cache_dtype=dtype)  # type: ignore[arg-type]
        session = open_session(llama, "ort-cpu", threads=1)
        cache = session.allocate_cache(1)
        session.prefill(cache, np.arange(9)[None], np.zeros(1, np.int64), np.array([[8]]))
        caches.append(cache.read(past_key(0)))
    np.testing.assert_array_equal(caches[1], caches[0].astype(np.float16))


def test_onnxruntimes_own_kernels_cannot_read_it(llama: Bundle) -> None:
    with pytest.raises(ValueError, match="float16 cache is read by kvgraph's CPU kernels alone"):
        build_ort_cpu(llama, "onnxruntime", cache_dtype="float16")


def test_command(llama: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", str(llama.path), "--target", "ort-cpu", "--cache-dtype", "float16"]) == 0
    assert main(["build", str(llama.path), "--target", "tensorrt-rtx", "--cache-dtype", "float16"]) == 2
    assert "--cache-dtype is for ort-cpu" in capsys.readouterr().err
