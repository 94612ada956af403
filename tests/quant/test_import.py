"""Checkpoints that are quantized already, as bundles: no number changes, and logits are those of what it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.exporter import ExportOptions
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.importer import import_checkpoint
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats

# Sums in another order; logits reach 10.
TOLERANCE = 1e-4
MATRIX = "model.layers.1.mlp.down_proj"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
FLOAT = {"num_bits": 8, "type": "float"}
WEIGHT_ONLY: dict[str, Callable[[ModuleType], tuple[Any, dict[str, Any] | None]]] = {
    "compressed-tensors int8": lambda make: compressed(
        make, "int-quantized", {"num_bits": 8, "strategy": "channel"}
    ),
    "compressed-tensors uint8": lambda make: compressed(
        make, "naive-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}
    ),
    "compressed-tensors int4": lambda make: compressed(make, "pack-quantized", INT4),
    "compressed-tensors uint4": lambda make: compressed(make, "pack-quantized", {**INT4, "symmetric": False}),
    "compressed-tensors int4 by channel": lambda make: compressed(
        make, "pack-quantized", {"num_bits": 4, "strategy": "channel"}
    ),
    "compressed-tensors fp8": lambda make: compressed(
        make, "naive-quantized", {**FLOAT, "strategy": "channel"}
    ),
    "gptq": lambda make: (make.gptq(), make.gptq_settings()),
    "gptq v2, asymmetric, 8 bits": lambda make: (
        make.gptq(8, 32, False, 2),
        make.gptq_settings(8, 32, False, 2),
    ),
    "gptq in an order": lambda make: (
        make.gptq(symmetric=False, seed=1),
        make.gptq_settings(symmetric=False, ordered=True),
    ),
    "awq": lambda make: (make.awq(), make.awq_settings()),
}


def compressed(make: ModuleType, form: str, weights: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return make.compressed(form, weights), make.compressed_settings(form, weights)


@pytest.fixture(scope="module")
def imported(quick_tracing: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """Imports a checkpoint, once for each set of options."""

    @functools.cache
    def run(checkpoint: Path, options: ExportOptions) -> Bundle:
        output = tmp_path_factory.mktemp("imported") / "bundle"
        return import_checkpoint(open_checkpoint(checkpoint), output, options)

    return lambda checkpoint, **options: run(checkpoint, ExportOptions(**options))


@pytest.fixture(scope="module")
def packed(
    tiny_checkpoint: Callable[..., Path], packers: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """A quantized checkpoint and the float one that it stands for."""

    @functools.cache
    def write(case: str, dtype: str) -> tuple[Path, Path]:
        pack, settings = WEIGHT_ONLY[case](packers)
        directory = tmp_path_factory.mktemp("packed")
        return packers.pack_checkpoint(tiny_checkpoint("llama", **SIZES), directory, pack, settings, dtype)

    return lambda case, dtype="float32": write(case, dtype)


def logits(session: OrtSession) -> Floats:
    """Of a prefill of five tokens and two decode steps, in a batch of two rows of unequal length."""
    ids = np.array([[5, 61, 3, 17, 40, 8, 2], [9, 33, 71, 0, 0, 55, 6]])
    lengths = np.array([5, 3])
    cache = session.allocate_cache(2)
    parts = [session.prefill(cache, ids[:, :5], np.zeros(2, np.int64), (lengths - 1)[:, None]).copy()]
    parts += [session.decode(cache, ids[:, 5 + step, None], lengths + step).copy() for step in range(2)]
    return np.stack([part.reshape(2, -1) for part in parts])


def dequantized(bundle: Bundle, module: str) -> Floats:
    """A weight [O, I] from the bundle's integers and scales, by the operator's formula."""
    with BundleWeights(bundle) as weights:
        codes = weights.read(f"{module}.weight").astype(np.float32)
        scale = weights.read(f"{module}.weight_scale").astype(np.float32)
        if f"{module}.weight_zero_point" in weights.tensors:
            zero = weights.read(f"{module}.weight_zero_point").astype(np.float32)
            codes -= zero if zero.ndim == 1 else np.repeat(zero, len(codes) // len(zero), axis=0)
    return (codes * (scale if scale.ndim == 1 else np.repeat(scale, len(codes) // len(scale), axis=0))).T


@pytest.mark.parametrize("case", WEIGHT_ONLY)
def test_logits_are_those_of_the_float_checkpoint(
    case: str,
    packed: Callable[..., tuple[Path, Path]],
    imported: Callable[..., Bundle],
    exported: Callable[..., Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    checkpoint, stands_for = packed(case)
    expected = logits(run_exactly(exported(stands_for)))
    np.testing.assert_allclose(logits(run_exactly(imported(checkpoint))), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", [case for case in WEIGHT_ONLY if case != "gptq in an order"])
def test_weights_are_those_that_the_library_reads_bit_for_bit(
    case: str,
    packers: ModuleType,
    packed: Callable[..., tuple[Path, Path]],
    imported: Callable[..., Bundle],
) -> None:
    checkpoint, stands_for = packed(case)
    expected = packers.load_file(stands_for / "model.safetensors")[f"{MATRIX}.weight"]
    np.testing.assert_array_equal(dequantized(imported(checkpoint), MATRIX), expected.numpy())


def test_the_recipe_says_where_it_comes_from(
    packed: Callable[..., tuple[Path, Path]], imported: Callable[..., Bundle]
) -> None:
    checkpoint, _ = packed("awq")
    bundle = imported(checkpoint)
    assert bundle.recipe is not None
    assert bundle.recipe["prefill"] == bundle.recipe["decode"]
    assert bundle.recipe["prefill"]["origin"]["method"] == "awq"
    assert bundle.recipe["prefill"]["origin"]["settings"]["version"] == "gemm"
    assert bundle.quantization is not None
    assert {module["snr_db"] for module in bundle.quantization["modules"]} == {None}
    assert len(bundle.quantization["modules"]) == 14
    assert set(bundle.quantization["left"]["prefill"]) == {"lm_head", "model.embed_tokens"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["compressed-tensors uint4", "compressed-tensors fp8", "gptq in an order"])
def test_builds_with_tensorrt_rtx(
    case: str, dtype: str, packed: Callable[..., tuple[Path, Path]], imported: Callable[..., Bundle]
) -> None:
    # float32 scales, or float16 ones in a bfloat16 graph, have to be kept as they are.
    bundle = imported(packed(case)[0], dtype=dtype)
    for graph in GRAPHS:
        model = onnx.load(bundle.graph_path(graph), load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(89,))
    assert [*build_tensorrt(bundle, "tensorrt-rtx", options).files] == ["model.engine"]
