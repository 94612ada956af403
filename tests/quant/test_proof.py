"""The proof that follows every quantization: it measures right, and it finds what was written wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import kvgraph.quant.quantizer
from kvgraph.export.bundle import Bundle
from kvgraph.export.weights_file import WEIGHTS_FILE, WeightsWriter
from kvgraph.quant.plan import (
    GraphPlan,
    QuantizationPlan,
    Rescaling,
    WeightPart,
    parse_plan,
    round_to_nearest,
)
from kvgraph.quant.quantized_weight import QuantizedWeight
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import load_recipe

FIRST_DOWN, DOWN = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"


def module(bundle: Bundle, name: str) -> dict[str, Any]:
    assert bundle.quantization is not None
    (found,) = [entry for entry in bundle.quantization["modules"] if entry["module"] == name]
    return found


@pytest.fixture
def quantize(tiny: Bundle, tmp_path: Path) -> Callable[..., Bundle]:
    """Quantizes the tiny bundle to INT8 with a quantizer of the test's own."""

    def run(quantizer: Callable[[WeightPart], QuantizedWeight] = round_to_nearest) -> Bundle:
        plan = GraphPlan(load_recipe("int8-wo"), weight_quantizer=quantizer)
        return quantize_bundle(tiny, QuantizationPlan(plan, plan), tmp_path / "out")

    return run


def test_signal_to_noise_is_that_of_the_formula(
    tiny: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    bundle = quantized(tiny, "int8-wo")
    exact = load_file(tiny.path / WEIGHTS_FILE)[f"{DOWN}.weight"].double().numpy()
    tensors = load_file(bundle.path / WEIGHTS_FILE)
    rounded = tensors[f"{DOWN}.weight"].double().numpy() * tensors[f"{DOWN}.weight_scale"].double().numpy()
    ratio = 10 * np.log10(np.square(exact).sum() / np.square(exact - rounded).sum())
    found = module(bundle, DOWN)
    assert found["snr_db"] == pytest.approx(ratio, abs=0.01)
    assert found["largest_error"] == pytest.approx(np.abs(exact - rounded).max(), rel=1e-3)
    scale = tensors[f"{DOWN}.weight_scale"].numpy()
    assert found["scale_range"] == pytest.approx([scale.min(), np.median(scale), scale.max()])
    assert (found["parameters"], found["nbytes"]) == (44 * 20, 44 * 20 + 20 * 4)


def test_every_format_has_its_own_signal_to_noise(
    stories: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    ratios = {
        recipe: min(entry["snr_db"] for entry in quantized(stories, recipe).quantization["modules"])
        for recipe in ("int8-wo", "fp8-wo", "int4-wo", "uint4-wo", "nvfp4-wo", "mxfp4-wo")
    }
    # 255 levels, 3 mantissa bits, 15 levels in blocks of 32, 16 levels, 1 mantissa bit in blocks.
    least = {"int8-wo": 40, "fp8-wo": 30, "int4-wo": 19, "uint4-wo": 20, "nvfp4-wo": 19, "mxfp4-wo": 17}
    assert {recipe: least[recipe] < ratio < least[recipe] + 6 for recipe, ratio in ratios.items()} == (
        dict.fromkeys(ratios, True)
    )


def test_worst_module_is_the_one_with_the_least_signal(
    tiny: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    found = quantized(tiny, "int4-wo").quantization
    assert found is not None
    assert found["worst_module"]["snr_db"] == min(entry["snr_db"] for entry in found["modules"])


def test_weight_without_an_error_has_no_ratio(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = exported(tiny_llama(num_hidden_layers=1))
    plan = GraphPlan(
        load_recipe("int8-wo"),
        rescalings={f"{FIRST_DOWN}.weight": Rescaling(outputs=np.zeros(20, np.float32))},
    )
    found = quantize_bundle(bundle, QuantizationPlan(plan, plan), tmp_path / "out")
    assert module(found, FIRST_DOWN)["snr_db"] is None
    assert module(found, FIRST_DOWN)["scale_range"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("scale", [0.0, np.nan, np.inf, -1.0])
def test_scale_that_is_no_positive_number_is_found(quantize: Callable[..., Bundle], scale: float) -> None:
    def spoil(part: WeightPart) -> QuantizedWeight:
        found = round_to_nearest(part)
        if part.module == DOWN:
            found.scale[3] = scale
        return found

    with pytest.raises(RuntimeError, match=f"{DOWN}.weight"):
        quantize(spoil)


def test_weight_of_another_module_is_found(quantize: Callable[..., Bundle]) -> None:
    last: list[QuantizedWeight] = []

    def swap(part: WeightPart) -> QuantizedWeight:
        last.append(round_to_nearest(part))
        # q_proj's place is given o_proj's size and so on: only gate and up have one shape.
        return last[-2] if part.module.endswith("1.mlp.up_proj") else last[-1]

    with pytest.raises(RuntimeError, match=r"1.mlp.up_proj.weight: read back, its signal to noise is -?\d"):
        quantize(swap)


def test_weight_that_was_not_written_is_found(
    quantize: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WeightsWriter.write

    def lose(self: WeightsWriter, name: str, data: memoryview, offset: int = 0) -> None:
        # Counted, so that the file is complete, but of zeros.
        write(self, name, memoryview(bytes(data.nbytes)) if name == f"{DOWN}.weight" else data, offset)

    monkeypatch.setattr(WeightsWriter, "write", lose)
    with pytest.raises(RuntimeError, match=f"{DOWN}.weight: read back, its signal to noise is 0"):
        quantize()


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        ("quantize_tokens", "the input of .* is not rounded as asked for"),
        ("relocate_weights", "the weights file says"),
    ],
)
def test_graph_that_was_not_rewritten_is_found(
    skipped: str, message: str, tiny: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvgraph.quant.quantizer, skipped, lambda *_: False)
    with pytest.raises(RuntimeError, match=message):
        quantize_bundle(tiny, parse_plan("int8-dynamic"), tmp_path / "out")
    assert not list(tmp_path.iterdir())
