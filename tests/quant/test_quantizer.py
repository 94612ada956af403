"""Writing quantized bundles: what is stored, shared and kept, and what only data could give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS
from kvgraph.export.inspect import inspect
from kvgraph.export.weights_file import WEIGHTS_FILE
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
from kvgraph.quant.recipe import Override, Recipe, load_recipe
from kvgraph.quant.scheme import CacheScheme

UP = "model.layers.0.mlp.up_proj"
NORM = "model.layers.0.post_attention_layernorm.weight"
# Rounding the products of a rescaled norm and weight in another order.
TOLERANCE = 1e-4
Quantize = Callable[[Bundle, str], Bundle]


def both(recipe: Recipe, **found: Any) -> QuantizationPlan:
    plan = GraphPlan(recipe, **found)
    return QuantizationPlan(plan, plan)


def no_graph_file(bundle: Bundle) -> dict[str, str]:
    return {
        name: entry.sha256 for name, entry in bundle.files.items() if not name.endswith((".onnx", "tensors"))
    }


def test_bundle_keeps_contract_source_and_tokenizer(stories: Bundle, quantized: Quantize) -> None:
    bundle = quantized(stories, "int8-wo")
    for name in ("model_type", "config", "dtype", "residual_dtype", "contract", "source"):
        assert getattr(bundle, name) == getattr(stories, name)
    assert no_graph_file(bundle) == no_graph_file(stories)
    assert "tokenizer.json" in bundle.files
    Bundle.open(bundle.path, verify=True)


def test_recipes_are_written_whole(tiny: Bundle, quantized: Quantize) -> None:
    bundle = quantized(tiny, "prefill=int8-dynamic,decode=int4-wo")
    assert bundle.recipe == {
        "prefill": load_recipe("int8-dynamic").to_json(),
        "decode": load_recipe("int4-wo").to_json(),
    }


def test_tensors_are_named_typed_and_shaped_as_documented(tiny: Bundle, quantized: Quantize) -> None:
    def tensors(recipe: str) -> dict[str, tuple[str, list[int]]]:
        weights = quantized(tiny, recipe).weights
        names = ("", "_scale", "_zero_point", "_global_scale")
        found = {name: weights.get(f"{UP}.weight{name}") for name in names}
        return {name: (entry["dtype"], entry["shape"]) for name, entry in found.items() if entry is not None}

    assert tensors("int8-wo") == {"": ("int8", [20, 44]), "_scale": ("float32", [44])}
    assert tensors("int4-wo") == {"": ("int4", [20, 44]), "_scale": ("float32", [1, 44])}
    assert tensors("uint4-wo") == {
        "": ("int4", [20, 44]),
        "_scale": ("float32", [1, 44]),
        "_zero_point": ("int4", [1, 44]),
    }
    assert tensors("nvfp4-wo") == {
        "": ("float4_e2m1", [20, 44]),
        "_scale": ("float8_e4m3fn", [2, 44]),
        "_global_scale": ("float32", []),
    }


def test_weights_file_is_what_safetensors_reads(tiny: Bundle, quantized: Quantize) -> None:
    bundle = quantized(tiny, "int4-wo")
    with safe_open(bundle.path / WEIGHTS_FILE, "np") as file:
        assert set(file.keys()) == set(bundle.weights)
        # Two a byte.
        assert file.get_slice(f"{UP}.weight").get_shape() == [20 * 44 // 2]


def test_scales_have_a_role_and_come_from_the_weights_source(tiny: Bundle, quantized: Quantize) -> None:
    weights = quantized(tiny, "nvfp4-wo").weights
    assert "role" not in weights[f"{UP}.weight"]
    assert [weights[f"{UP}.weight_{role}"]["role"] for role in ("scale", "global_scale")] == [
        "scale",
        "global_scale",
    ]
    assert weights[f"{UP}.weight_scale"]["source"] == tiny.weights[f"{UP}.weight"]["source"]


def test_inspect_counts_every_parameter_once(tiny: Bundle, quantized: Quantize) -> None:
    for recipe in ("nvfp4-wo", "prefill=int8-dynamic,decode=int4-wo"):
        assert inspect(quantized(tiny, recipe).path).parameters == inspect(tiny.path).parameters


def test_what_stays_float_is_copied_bit_for_bit(tiny: Bundle, quantized: Quantize) -> None:
    before, after = (load_file(one.path / WEIGHTS_FILE) for one in (tiny, quantized(tiny, "int8-wo")))
    kept = [
        name for name in before if "norm" in name or name in ("lm_head.weight", "model.embed_tokens.weight")
    ]
    assert len(kept) == 7
    for name in kept:
        assert before[name].equal(after[name])


def test_what_was_left_and_why(tiny: Bundle, quantized: Quantize) -> None:
    bundle = quantized(tiny, "int8-wo")
    assert bundle.quantization is not None
    reason = "the recipe keeps it"
    left = {"model.embed_tokens": reason, "lm_head": reason}
    assert bundle.quantization["left"] == {"prefill": left, "decode": left}
    assert len(bundle.quantization["modules"]) == 14


class TestPhases:
    def test_equal_schemes_are_stored_once(self, tiny: Bundle, quantized: Quantize) -> None:
        split, single = quantized(tiny, "prefill=int8-dynamic,decode=int8-wo"), quantized(tiny, "int8-wo")
        assert split.weights == single.weights
        assert split.files[WEIGHTS_FILE] == single.files[WEIGHTS_FILE]
        assert split.files["decode.onnx"] == single.files["decode.onnx"]

    def test_different_schemes_are_stored_apart_and_the_rest_once(
        self, tiny: Bundle, quantized: Quantize
    ) -> None:
        bundle = quantized(tiny, "prefill=int8-dynamic,decode=int4-wo")
        assert bundle.weights[f"prefill.{UP}.weight"]["dtype"] == "int8"
        assert bundle.weights[f"decode.{UP}.weight"]["dtype"] == "int4"
        assert f"{UP}.weight" not in bundle.weights
        assert NORM in bundle.weights
        reads = {
            graph: set(ir.load(bundle.graph_path(graph)).graph.initializers) & set(bundle.weights)
            for graph in GRAPHS
        }
        assert reads["prefill"] | reads["decode"] == set(bundle.weights)
        assert not [name for name in reads["prefill"] if name.startswith("decode.")]
        assert not [name for name in reads["decode"] if name.startswith("prefill.")]

    def test_graph_that_keeps_a_weight_has_a_float_copy(self, tiny: Bundle, tmp_path: Path) -> None:
        plan = QuantizationPlan(
            GraphPlan(load_recipe("int8-wo")),
            GraphPlan(replace(load_recipe("int8-wo"), overrides=(Override(UP, None),))),
        )
        weights = quantize_bundle(tiny, plan, tmp_path / "out").weights
        assert weights[f"prefill.{UP}.weight"]["dtype"] == "int8"
        assert weights[f"decode.{UP}.weight"]["dtype"] == "float32"


class TestAlgorithms:
    def test_weight_quantizer_is_asked_in_the_order_of_the_graph(self, tiny: Bundle, tmp_path: Path) -> None:
        asked: list[WeightPart] = []

        def record(part: WeightPart) -> QuantizedWeight:
            asked.append(part)
            return round_to_nearest(part)

        quantize_bundle(tiny, both(load_recipe("int8-wo"), weight_quantizer=record), tmp_path / "out")
        layers = [part.module.split(".")[2] for part in asked]
        assert layers == sorted(layers)
        assert len(asked) == 14
        part = next(part for part in asked if part.module == UP)
        expected = load_file(tiny.path / WEIGHTS_FILE)[f"{UP}.weight"].numpy()
        np.testing.assert_array_equal(part.weight, expected)
        assert (part.first_output, part.scale_dtype) == (0, np.float32)

    @pytest.mark.parametrize("recipe", ["int8-wo", "nvfp4-wo", "uint4-wo"])
    def test_large_matrix_comes_in_parts_that_add_up(
        self, recipe: str, tiny: Bundle, quantized: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts: list[WeightPart] = []

        def record(part: WeightPart) -> QuantizedWeight:
            parts.append(part)
            return round_to_nearest(part)

        for size in ("PART_WEIGHTS", "BAND_WEIGHTS"):
            monkeypatch.setattr(f"kvgraph.quant.tensor_writer.{size}", 160)
        plan = both(load_recipe(recipe), weight_quantizer=record)
        pieces = quantize_bundle(tiny, plan, tmp_path / "parts")
        assert [part.first_output for part in parts if part.module == UP] == [0, 8, 16, 24, 32, 40]
        assert pieces.files[WEIGHTS_FILE] == quantized(tiny, recipe).files[WEIGHTS_FILE]

    def test_rescaling_leaves_the_function_unchanged(
        self, tiny: Bundle, tmp_path: Path, run_exactly: Callable[[Bundle], Any]
    ) -> None:
        factors = np.random.default_rng(0).uniform(0.5, 2, 20).astype(np.float32)
        rescalings = {NORM: Rescaling(outputs=1 / factors)}
        for name in ("gate_proj", "up_proj"):
            rescalings[f"model.layers.0.mlp.{name}.weight"] = Rescaling(inputs=factors)
        # Nothing else is rounded, and that hardly.
        int8 = load_recipe("int8-wo")
        overrides = (Override("model.layers.*", None), Override("*.1.mlp.down_proj", int8.linear))
        recipe = replace(int8, overrides=overrides)
        plan = both(recipe, rescalings=rescalings)
        found = quantize_bundle(tiny, plan, tmp_path / "rescaled")
        plain = quantize_bundle(tiny, both(recipe), tmp_path / "plain")
        logits = [self._logits(run_exactly(bundle)) for bundle in (found, plain)]
        np.testing.assert_allclose(*logits, rtol=0, atol=TOLERANCE)
        stored, original = (load_file(one.path / WEIGHTS_FILE) for one in (found, tiny))
        np.testing.assert_allclose(stored[NORM].numpy(), original[NORM].numpy() / factors, rtol=1e-6)

    def test_rescaled_weight_is_what_is_quantized(self, tiny: Bundle, tmp_path: Path) -> None:
        factors = np.random.default_rng(0).uniform(0.5, 2, 20).astype(np.float32)
        plan = both(load_recipe("int8-wo"), rescalings={f"{UP}.weight": Rescaling(inputs=factors)})
        bundle = quantize_bundle(tiny, plan, tmp_path / "out")
        original = load_file(tiny.path / WEIGHTS_FILE)[f"{UP}.weight"].numpy() * factors[:, None]
        scale = load_file(bundle.path / WEIGHTS_FILE)[f"{UP}.weight_scale"].numpy()
        np.testing.assert_allclose(scale, np.abs(original).max(axis=0) / 127, rtol=1e-6)

    def test_rescaled_norm_that_overflows_is_refused(
        self, exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path: Path
    ) -> None:
        bundle = exported(tiny_llama(num_hidden_layers=1), dtype="float16")
        factors = Rescaling(inputs=np.full(20, 1e6, np.float32))
        plan = both(load_recipe("int8-wo"), rescalings={"lm_head.weight": factors})
        with pytest.raises(ValueError, match="out of the range of float16"):
            quantize_bundle(bundle, plan, tmp_path / "out")

    @staticmethod
    def _logits(session: Any) -> np.ndarray:
        cache = session.allocate_cache(1)
        ids = np.arange(1, 9)[None]
        return session.prefill(cache, ids, np.array([0]), np.arange(8)[None])


class TestInputs:
    def test_products_of_one_input_share_its_rounding(self, tiny: Bundle, quantized: Quantize) -> None:
        for recipe in ("int8-sq", "int8-dynamic"):
            model = ir.load(quantized(tiny, recipe).graph_path("decode"))
            rounded = [node for node in model.graph if node.op_type == "QuantizeLinear"]
            # Of each layer: q, k and v; o; gate and up; down.
            assert len(rounded) == 2 * 4
            readers = [len(node.outputs[0].consumers()[0].outputs[0].uses()) for node in rounded]
            assert readers == [3, 1, 2, 1] * 2

    @pytest.mark.parametrize(
        ("changes", "missing"),
        [
            ({"algorithm": "gptq"}, "algorithm gptq"),
            ({"algorithm": "awq"}, "algorithm awq"),
            ({"smooth_quant": 0.5}, "smooth_quant"),
            ({"kv_cache": CacheScheme("int8")}, "kv_cache"),
        ],
    )
    def test_what_only_data_can_give_is_missed(
        self, tiny: Bundle, tmp_path: Path, changes: dict[str, Any], missing: str
    ) -> None:
        recipe = replace(load_recipe("int8-wo"), **changes)
        with pytest.raises(ValueError, match=f"'int8-wo': {missing} needs data; give --calibration FILE"):
            quantize_bundle(tiny, both(recipe), tmp_path / "out")

    def test_missing_scale_is_an_error(self, tiny: Bundle, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="q_proj has no scale for its input; give --calibration"):
            quantize_bundle(tiny, parse_plan("fp8"), tmp_path / "out")

    @pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
    def test_scale_that_is_no_positive_number_is_an_error(
        self, tiny: Bundle, tmp_path: Path, scale: float
    ) -> None:
        model = ir.load(tiny.graph_path("prefill"))
        names = [name.removesuffix(".weight") for name in model.graph.initializers if "proj" in name]
        plan = both(load_recipe("fp8"), activation_scales=dict.fromkeys(names, scale))
        with pytest.raises(ValueError, match="expected a positive number"):
            quantize_bundle(tiny, plan, tmp_path / "out")
        assert not list(tmp_path.iterdir())
