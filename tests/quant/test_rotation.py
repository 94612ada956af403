"""Rotations of the residual stream and of values: the function stays, and what stood out no longer does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.ort_cpu import build_ort_cpu
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibrated_plan import calibrate_plan
from kvgraph.quant.calibration_data import CalibrationOptions, read_calibration
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.orthogonal import random_hadamard
from kvgraph.quant.plan import GraphPlan, QuantizationPlan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import Recipe, load_recipe, parse_recipe
from kvgraph.quant.rotated_bundle import rotated_bundle
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats

# Of the largest logit: products with a dense matrix, in float32.
TOLERANCE = 1e-4
FLOAT_PERPLEXITY = 6.762
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

# Family -> changes to its config.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with biases, one key/value head": {
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
    "llama with a tied head": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5, "rope_parameters": ROPE},
    # The biases of query, key and value are outside the stream.
    "qwen2": {"rope_parameters": ROPE},
    "qwen3": {"rope_parameters": ROPE},
    # Scalars before and behind the stream.
    "granite": {
        "rope_parameters": ROPE,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "phi": ({"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}, "its norms are LayerNorm"),
    "olmo2": ({"rope_parameters": ROPE}, "a norm is between a product and the residual stream"),
}


def all_logits(bundle: Bundle, target: str | None = None) -> Floats:
    """Of a prompt and of one decoded token."""
    session = OrtSession(bundle, threads=1) if target is None else open_session(bundle, target)
    ids = np.random.default_rng(0).integers(0, 97, (2, 20))
    cache = session.allocate_cache(2, 21)
    positions = np.tile(np.arange(20), (2, 1))
    prefilled = session.prefill(cache, ids, np.zeros(2, np.int64), positions).copy()
    decoded = session.decode(cache, ids[:, :1], np.full(2, 20)).copy()
    return np.concatenate([prefilled, decoded], axis=1)


@pytest.mark.parametrize("size", [1, 2, 8, 12, 20, 64, 172, 576])
def test_matrices_are_orthogonal_and_spread_every_channel(size: int) -> None:
    matrix = random_hadamard(size)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    if size & (size - 1) == 0:
        np.testing.assert_allclose(np.abs(matrix), size**-0.5)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rotation_leaves_the_function(
    tiny_checkpoint: Callable[..., Path], exported: Callable[..., Bundle], tmp_path: Path, name: str
) -> None:
    bundle = exported(tiny_checkpoint(name.split()[0], **FAMILIES[name]), dtype="float32")
    expected = all_logits(bundle)
    with rotated_bundle(bundle, tmp_path) as rotated:
        assert rotated.is_rotated
        np.testing.assert_allclose(
            all_logits(rotated), expected, atol=TOLERANCE * float(np.abs(expected).max())
        )
        before = [node.op_type for node in ir.load(bundle.graph_path("decode")).graph]
        assert [node.op_type for node in ir.load(rotated.graph_path("decode")).graph] == before
        changed = "model.layers.1.self_attn.v_proj.weight"
        with BundleWeights(bundle) as own, BundleWeights(rotated) as theirs:
            assert not np.allclose(own.read(changed), theirs.read(changed))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_no_rotation_passes_are_refused(
    tiny_checkpoint: Callable[..., Path], exported: Callable[..., Bundle], tmp_path: Path, family: str
) -> None:
    changes, reason = REFUSED[family]
    bundle = exported(tiny_checkpoint(family, **changes), dtype="float32")
    with (
        pytest.raises(ValueError, match=f"cannot be rotated, {reason}"),
        rotated_bundle(bundle, tmp_path),
    ):
        pass


def test_a_rotation_is_asked_for_and_made(tiny: Bundle, tmp_path: Path) -> None:
    graph = GraphPlan(replace(load_recipe("int8-wo"), rotation="hadamard"))
    with pytest.raises(ValueError, match=r"asks for a rotation and .* has none"):
        quantize_bundle(tiny, QuantizationPlan(graph, graph), tmp_path / "out")
    plain = GraphPlan(load_recipe("int8-wo"))
    with (
        rotated_bundle(tiny, tmp_path) as rotated,
        pytest.raises(ValueError, match=r"asks for none and .* has one"),
    ):
        quantize_bundle(rotated, QuantizationPlan(plain, plain), tmp_path / "out")
    with pytest.raises(ValueError, match="rotation is in one alone; both graphs read one cache"):
        quantize_bundle(tiny, QuantizationPlan(graph, plain), tmp_path / "out")
    with pytest.raises(ValueError, match="rotation is 'fourier', expected \"hadamard\" or none"):
        parse_recipe({"rotation": "fourier"}, "test")


def test_an_outlier_is_spread(
    outlier_model: Bundle,
    calibrated: Callable[..., Bundle],
    perplexity: Callable[[Bundle], float],
    story_file: Path,
    tmp_path: Path,
) -> None:
    """Static scales of whole inputs break where one channel outgrows all others, and not once it is spread."""
    recipe = replace(load_recipe("int8-sq"), name="int8-static", smooth_quant=None)
    assert perplexity(calibrated(outlier_model, recipe)) > 2 * FLOAT_PERPLEXITY
    found = quantized_rotated(outlier_model, recipe, story_file, tmp_path)
    assert perplexity(found) == pytest.approx(FLOAT_PERPLEXITY, rel=0.02)
    assert found.quantization is not None
    assert found.quantization["source_digest"] == outlier_model.digest()


def quantized_rotated(bundle: Bundle, recipe: Recipe, text: Path, folder: Path) -> Bundle:
    """A bundle quantized by a recipe behind a rotation, calibrated on a text."""
    graph = GraphPlan(replace(recipe, rotation="hadamard"))
    plan = QuantizationPlan(graph, graph)
    with rotated_bundle(bundle, folder) as rotated, BundleWeights(rotated) as weights:
        data = read_calibration(text, rotated, CalibrationOptions(samples=48))
        plan = calibrate_plan(LayerwiseModel(rotated, weights, data), plan, folder)
        return quantize_bundle(rotated, plan, folder / "out", source=bundle)


def test_rotated_bundles_run_and_build(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    """By the command, of a model whose head was tied: the recipe is data, and the other files come along."""
    tied = exported(tiny_llama(num_hidden_layers=1, tie_word_embeddings=True), dtype="float16")
    recipe = tmp_path / "rotated.toml"
    weight = '[linear.weight]\nformat = "int4"\nblock_size = 16\n'
    recipe.write_text(f'lm_head = "linear"\nrotation = "hadamard"\n{weight}')
    output = tmp_path / "out"
    assert main(["quantize", str(tied.path), "-o", str(output), "--recipe", str(recipe)]) == 0
    bundle = Bundle.open(output, verify=True)
    assert bundle.weights["lm_head.weight"]["dtype"] == "int4"
    assert bundle.recipe is not None
    assert bundle.recipe["decode"]["rotation"] == "hadamard"
    assert np.isfinite(all_logits(bundle)).all()
    build_ort_cpu(bundle)
    assert np.isfinite(all_logits(bundle, "ort-cpu")).all()
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(89,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (89,)


def test_compare_leaves_out_what_a_rotation_changes(
    tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rotated values are no error: a bundle in 8 bits is in the band of its source."""
    recipe = tmp_path / "rotated.toml"
    recipe.write_text('rotation = "hadamard"\n[linear.weight]\nformat = "int8"\n')
    output = str(tmp_path / "out")
    assert main(["quantize", str(tiny.path), "-o", output, "--recipe", str(recipe)]) == 0
    against = ["compare", output, "--against", str(tiny.path), "--prefill", "8", "--steps", "4"]
    assert main(against) == 0
    assert "worst cache" in capsys.readouterr().out  # of the keys, which are not rotated
    assert main([*against, "--layers"]) == 2
    assert (
        "--layers compares the residual stream, which one of the two has rotated" in capsys.readouterr().err
    )
    assert main(["compare", output, "--against", output, "--prefill", "8", "--steps", "4", "--layers"]) == 0
