"""What is not quantized, and that nothing is left behind then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.plan import GraphPlan, QuantizationPlan, parse_plan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import Recipe

UP = "model.layers.0.mlp.up_proj"
Quantize = Callable[[Bundle, str], Bundle]


def test_quantized_bundle(tiny: Bundle, quantized: Quantize, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is quantized already \(int8-wo\); quantize the float bundle"):
        quantize_bundle(quantized(tiny, "int8-wo"), parse_plan("int4-wo"), tmp_path / "out")


def test_bundle_without_weights(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = exported(tiny_llama(), weights=False)
    with pytest.raises(ValueError, match="has no weights; export it again"):
        quantize_bundle(bundle, parse_plan("int8-wo"), tmp_path / "out")


def test_output_that_is_the_input(tiny: Bundle) -> None:
    with pytest.raises(ValueError, match="is the bundle to quantize"):
        quantize_bundle(tiny, parse_plan("int8-wo"), tiny.path, force=True)


def test_output_that_exists(tiny: Bundle, tmp_path: Path) -> None:
    quantize_bundle(tiny, parse_plan("int8-wo"), tmp_path / "out")
    with pytest.raises(FileExistsError, match="use --force"):
        quantize_bundle(tiny, parse_plan("int8-wo"), tmp_path / "out")
    assert quantize_bundle(tiny, parse_plan("int4-wo"), tmp_path / "out", force=True).recipe


def test_recipe_that_matches_nothing(tiny: Bundle, tmp_path: Path) -> None:
    plan = GraphPlan(Recipe("nothing"))
    with pytest.raises(ValueError, match="'nothing' quantizes no weight of prefill"):
        quantize_bundle(tiny, QuantizationPlan(plan, plan), tmp_path / "out")


def test_weight_that_is_not_finite(tiny: Bundle, tmp_path: Path) -> None:
    with BundleWeights(tiny) as weights:
        offset = weights.tensors[f"{UP}.weight"].offset
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in tiny.path.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    with (damaged / WEIGHTS_FILE).open("r+b") as file:
        file.seek(offset)
        file.write(np.float32(np.nan).tobytes())
    with pytest.raises(ValueError, match=f"{UP}.weight' holds NaN"):
        quantize_bundle(Bundle.open(damaged), parse_plan("int8-wo"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]
