"""Every recipe on every runtime, from the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.targets.compute_capabilities import choose_capabilities
from kvgraph.export.targets.ort_cpu import build_ort_cpu
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.quant.recipe_files import recipe_names
from kvgraph.runtime.open import open_session
from kvgraph.runtime.tensorrt_module import load_tensorrt

ADA, BLACKWELL = 89, 120
# Recipe -> whether ONNX Runtime runs the canonical files on a CPU, and the oldest GPU of TensorRT-RTX with its types.
RUNTIMES = {
    "fp8": (True, ADA),
    "fp8-dynamic": (True, ADA),
    "fp8-wo": (True, ADA),
    "int4-all": (True, 80),
    "int4-wo": (True, 80),
    "int8-all": (True, 80),
    "int8-dynamic": (True, 80),
    "int8-dynamic-all": (True, 80),
    "int8-sq": (True, 80),
    "int8-wo": (True, 80),
    "mxfp4-wo": (False, BLACKWELL),
    "nvfp4-wo": (False, BLACKWELL),
    "uint4-wo": (True, 80),
    "prefill=int8-dynamic,decode=int4-wo": (True, 80),
}
# What an embedding table, and the head that it is, may be rounded to.
TABLES = {
    "int8": 'format = "int8"',
    "int4": 'format = "int4"\nblock_size = 16',
    "uint4": 'format = "uint4"\nblock_size = 16',
    "fp8": 'format = "float8_e4m3fn"',
    "nvfp4": 'format = "float4_e2m1"\nblock_size = 16\nscale_form = "float8_e4m3fn"',
}


@pytest.fixture(scope="module")
def small(exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]) -> Bundle:
    """One layer in float16, whose 44 inputs are no whole blocks."""
    return exported(tiny_llama(num_hidden_layers=1), dtype="float16")


def test_every_recipe_is_listed() -> None:
    assert RUNTIMES.keys() >= set(recipe_names())


@pytest.mark.parametrize("recipe", RUNTIMES)
def test_passes_the_checker_and_holds_standard_operators_alone(
    recipe: str, small: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    bundle = quantized(small, recipe)
    for graph in GRAPHS:
        onnx.checker.check_model(str(bundle.graph_path(graph)), full_check=True)
        model = onnx.load(bundle.graph_path(graph), load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}
        assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]


@pytest.mark.parametrize("recipe", RUNTIMES)
def test_runs_on_onnxruntime(recipe: str, small: Bundle, quantized: Callable[[Bundle, str], Bundle]) -> None:
    bundle = quantized(small, recipe)
    canonical, _ = RUNTIMES[recipe]
    if not canonical:
        with pytest.raises(ValueError, match=r"4-bit floats, .* run kvgraph build .* --target ort-cpu"):
            open_session(bundle)
        build_ort_cpu(bundle)
    session = open_session(bundle, None if canonical else "ort-cpu")
    cache = session.allocate_cache(1)
    prefilled = session.prefill(cache, np.array([[1, 2, 3]]), np.array([0]), np.array([[2]]))
    decoded = session.decode(cache, np.array([[4]]), np.array([3]))
    assert np.isfinite(prefilled).all()
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("recipe", RUNTIMES)
def test_builds_with_tensorrt_rtx(
    recipe: str, small: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    bundle = quantized(small, recipe)
    capability = max(ADA, RUNTIMES[recipe][1])
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(capability,))
    target = build_tensorrt(bundle, "tensorrt-rtx", options)
    assert target.compute_capabilities == (capability,)
    assert len(target.files) == (2 if "decode=" in recipe else 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recipe", ["int8-dynamic", "uint4-wo", "fp8", "nvfp4-wo"])
def test_builds_with_tensorrt_rtx_in_other_types(
    recipe: str,
    dtype: str,
    exported: Callable[..., Bundle],
    tiny_llama: Callable[..., Path],
    quantized: Callable[[Bundle, str], Bundle],
) -> None:
    bundle = quantized(exported(tiny_llama(num_hidden_layers=1), dtype=dtype), recipe)
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(BLACKWELL,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (BLACKWELL,)


@pytest.mark.parametrize("weight", TABLES)
def test_quantized_embedding_and_head_build_with_tensorrt_rtx(
    weight: str,
    exported: Callable[..., Bundle],
    tiny_llama: Callable[..., Path],
    tmp_path: Path,
    quantized: Callable[[Bundle, str], Bundle],
) -> None:
    recipe = tmp_path / "everything.toml"
    recipe.write_text(f'lm_head = "linear"\nembedding = "linear"\n[linear.weight]\n{TABLES[weight]}\n')
    tied = exported(tiny_llama(num_hidden_layers=1, tie_word_embeddings=True), dtype="float16")
    bundle = quantized(tied, str(recipe))
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(BLACKWELL,))
    target = build_tensorrt(bundle, "tensorrt-rtx", options)
    assert [*target.files] == ["model.engine"]


@pytest.mark.parametrize(
    ("recipe", "capability", "message"),
    [
        (
            "nvfp4-wo",
            89,
            "float4_e2m1 tensors, SM89 has no 4-bit floats, which begin with Blackwell; leave 89",
        ),
        ("mxfp4-wo", 80, "SM80 has no 4-bit floats"),
        ("fp8", 86, "float8_e4m3fn tensors, SM86 has no 8-bit floats; leave 86 out .* choose an INT8 recipe"),
        ("int4-wo", 75, "int4 tensors, SM75 has no int4"),
        ("uint4-wo", 75, "int4 tensors, SM75 has no int4"),
    ],
)
def test_gpu_without_the_format_is_refused_before_any_work(
    recipe: str,
    capability: int,
    message: str,
    small: Bundle,
    quantized: Callable[[Bundle, str], Bundle],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvgraph.export.targets.tensorrt.lower_for_tensorrt", None)
    options = TensorRTOptions(compute_capabilities=(capability,))
    with pytest.raises(ValueError, match=message):
        build_tensorrt(quantized(small, recipe), "tensorrt-rtx", options)


def test_default_is_every_gpu_that_has_the_formats(
    small: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    trt = load_tensorrt("tensorrt-rtx")
    chosen = {
        recipe: choose_capabilities(trt, "tensorrt-rtx", quantized(small, recipe), None)
        for recipe in ("int8-wo", "int4-wo", "fp8", "nvfp4-wo")
    }
    assert chosen == {
        "int8-wo": (75, 80, 86, 89, 120, 121),
        "int4-wo": (80, 86, 89, 120, 121),
        "fp8": (89, 120, 121),
        "nvfp4-wo": (120, 121),
    }


def test_one_engine_cannot_have_two_recipes(
    small: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    # The weights are the same: only prefill rounds its inputs.
    bundle = quantized(small, "prefill=int8-dynamic,decode=int8-wo")
    assert not [name for name in bundle.weights if name.startswith(("prefill.", "decode."))]
    options = TensorRTOptions(engines="one", compute_capabilities=(ADA,))
    with pytest.raises(ValueError, match="different recipes, which one engine cannot hold"):
        build_tensorrt(bundle, "tensorrt-rtx", options)
