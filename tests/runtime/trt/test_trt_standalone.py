"""A TensorRT target in a bundle of its own, on the stand-ins of conftest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.standalone import build_standalone
from kvgraph.runtime.open import trt_session
from kvgraph.runtime.target import Target


@pytest.fixture(scope="module")
def bundle(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    return exported(tiny_llama(), dtype="float32")


def test_an_engine_alone_computes_what_it_does_in_its_bundle(
    bundle: Bundle, open_fake: Callable[..., Any], teacher_forced: Callable[..., Any], tmp_path: Path
) -> None:
    session, gpu, trt = open_fake(bundle, max_batch=2)
    alone = build_standalone(bundle, tmp_path / "alone", lambda: Target.open(bundle, "tensorrt-rtx"))
    assert not list(alone.path.glob("*.safetensors"))
    ids = np.random.default_rng(5).integers(0, bundle.contract.vocab_size, (2, 8))
    found = teacher_forced(trt_session(alone)(alone, trt=trt, cuda_runtime=gpu), ids, [5, 1, 1, 1])
    np.testing.assert_array_equal(found, teacher_forced(session, ids, [5, 1, 1, 1]))


def test_an_engine_alone_for_another_gpu_says_how_to_build_it_again(
    bundle: Bundle, open_fake: Callable[..., Any], fake_gpu: Any, tmp_path: Path
) -> None:
    _, _, trt = open_fake(bundle)
    alone = build_standalone(bundle, tmp_path / "alone", lambda: Target.open(bundle, "tensorrt-rtx"))
    again = (
        rf"this GPU is SM61; .*kvgraph build BUNDLE --target tensorrt-rtx --standalone {alone.path} --force"
    )
    with pytest.raises(ValueError, match=again):
        trt_session(alone)(alone, trt=trt, cuda_runtime=fake_gpu(61))
