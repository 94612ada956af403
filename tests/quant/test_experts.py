"""Stacked experts: quantized, run and built; their routers stay float."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.quant.recipe_files import recipe_names
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats

# Sums in another order.
TOLERANCE = 2e-4
BLOCK = "model.layers.0.mlp"
RECIPES = ["int8-wo", "int4-wo", "fp8-wo", "int8-dynamic"]
INT4 = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1], dtype=torch.float32)
Quantize = Callable[[Bundle, str], Bundle]


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    """Two of three experts; prefill reads all, decode those that are chosen."""
    return tiny_checkpoint("mixtral", num_hidden_layers=1, num_local_experts=3, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def mixtral(checkpoint: Path, exported: Callable[..., Bundle]) -> Bundle:
    return exported(checkpoint)


def decoded(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A weight [I, O] or [X, I, O], by the formats' definitions; `int4-wo` has blocks of 32."""
    stored, scale = tensors[name], tensors[f"{name}_scale"].float()
    inputs = {"down_proj": 44, "o_proj": 32}.get(name.split(".")[-2], 20)
    if stored.dtype == torch.uint8:
        pairs = torch.stack([stored & 15, stored >> 4], dim=1).view(-1)
        stored = INT4[pairs.long()].view(*scale.shape[:-2], inputs, scale.shape[-1])
        scale = scale.repeat_interleave(32, dim=-2)[..., :inputs, :]
    return stored.float() * scale


@pytest.mark.parametrize("recipe", RECIPES[:3])
def test_logits_are_those_of_the_dequantized_experts(
    recipe: str,
    checkpoint: Path,
    mixtral: Bundle,
    quantized: Quantize,
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    bundle = quantized(mixtral, recipe)
    tensors = load_file(bundle.path / WEIGHTS_FILE)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    layer = model.model.layers[0]
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = decoded(tensors, f"model.layers.0.self_attn.{name}.weight")
        getattr(layer.self_attn, name).weight.data = weight.T
    gate, up, down = (
        decoded(tensors, f"{BLOCK}.experts.{name}_proj.weight").mT for name in ("gate", "up", "down")
    )
    layer.mlp.experts.gate_up_proj.data = torch.cat([gate, up], dim=1)
    layer.mlp.experts.down_proj.data = down.contiguous()
    ids = np.random.default_rng(0).integers(0, 97, (2, 9))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    session = run_exactly(bundle)
    cache = session.allocate_cache(2)
    positions = np.tile(np.arange(8), (2, 1))
    prefilled = session.prefill(cache, ids[:, :8], np.zeros(2, np.int64), positions)
    np.testing.assert_allclose(prefilled, expected[:, :8], rtol=0, atol=TOLERANCE)
    decoded_logits = session.decode(cache, ids[:, 8:], np.full(2, 8))
    np.testing.assert_allclose(decoded_logits, expected[:, 8:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("recipe", [*RECIPES, "uint4-wo", "nvfp4-wo"])
def test_experts_are_weight_only_and_routers_float(recipe: str, mixtral: Bundle, quantized: Quantize) -> None:
    found = quantized(mixtral, recipe).quantization
    assert found is not None
    modules = {entry["module"]: entry for entry in found["modules"]}
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert modules[f"{BLOCK}.experts.{name}"]["activations"] == {}
        assert modules[f"{BLOCK}.experts.{name}"]["snr_db"] > 15
    assert found["left"]["decode"][f"{BLOCK}.gate.weight"] == "is a router"


def test_scales_are_of_each_expert_and_output(mixtral: Bundle, quantized: Quantize) -> None:
    weights = quantized(mixtral, "int8-wo").weights
    assert weights[f"{BLOCK}.experts.down_proj.weight"]["shape"] == [3, 44, 20]
    assert weights[f"{BLOCK}.experts.down_proj.weight_scale"]["shape"] == [3, 1, 20]
    exact = load_file(mixtral.path / WEIGHTS_FILE)[f"{BLOCK}.experts.down_proj.weight"]
    scale = load_file(quantized(mixtral, "int8-wo").path / WEIGHTS_FILE)[
        f"{BLOCK}.experts.down_proj.weight_scale"
    ]
    np.testing.assert_allclose(scale[:, 0].numpy(), exact.abs().amax(dim=1).numpy() / 127, rtol=1e-6)


def test_experts_of_odd_4_bit_size_stay_float(
    tiny_checkpoint: Callable[..., Path], exported: Callable[..., Bundle], quantized: Quantize
) -> None:
    sizes = {"hidden_size": 15, "intermediate_size": 13, "num_local_experts": 3, "num_experts_per_tok": 2}
    bundle = exported(tiny_checkpoint("mixtral", num_hidden_layers=1, **sizes))
    left = quantized(bundle, "int4-wo").quantization["left"]["prefill"]
    assert (
        left[f"{BLOCK}.experts.up_proj"]
        == "an expert's 4-bit weights or zero points would begin within a byte"
    )
    assert f"{BLOCK}.experts.up_proj" not in quantized(bundle, "int8-wo").quantization["left"]["prefill"]


@pytest.mark.parametrize(
    ("recipe", "capability"),
    [
        ("int8-wo", 89),
        ("int8-dynamic", 89),
        ("int4-wo", 89),
        ("uint4-wo", 89),
        ("fp8-wo", 89),
        ("fp8-dynamic", 89),
        ("nvfp4-wo", 120),
        ("mxfp4-wo", 120),
    ],
)
def test_builds_with_tensorrt_rtx(
    recipe: str, capability: int, checkpoint: Path, exported: Callable[..., Bundle], quantized: Quantize
) -> None:
    bundle = quantized(exported(checkpoint, dtype="float16"), recipe)
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(capability,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (capability,)


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_runs_on_onnxruntime_and_a_row_ignores_its_neighbours(
    recipe: str, mixtral: Bundle, quantized: Quantize, run_exactly: Callable[[Bundle], OrtSession]
) -> None:
    session = run_exactly(quantized(mixtral, recipe))
    ids = np.random.default_rng(3).integers(0, 97, (3, 8))

    def run(rows: slice) -> Floats:
        count = len(ids[rows])
        cache, past = session.allocate_cache(count), np.zeros(count, np.int64)
        positions = np.tile(np.arange(7), (count, 1))
        prefilled = session.prefill(cache, ids[rows, :7], past, positions).copy()
        decoded = session.decode(cache, ids[rows, 7:], past + 7).copy()
        return np.concatenate([prefilled, decoded], axis=1)

    together = run(slice(None))
    assert np.isfinite(together).all()
    np.testing.assert_allclose(together[1:2], run(slice(1, 2)), rtol=0, atol=TOLERANCE)


def test_few_of_many_experts_are_grouped(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    quantized: Quantize,
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    experts = {
        "num_experts": 17,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "norm_topk_prob": True,
    }
    bundle = exported(tiny_checkpoint("qwen3_moe", num_hidden_layers=1, **experts))
    ids = np.random.default_rng(0).integers(0, 97, (1, 12))
    logits = []
    for one in (bundle, quantized(bundle, "int8-wo")):
        session = run_exactly(one)
        positions = np.arange(12)[None]
        logits.append(session.prefill(session.allocate_cache(1), ids, np.zeros(1, np.int64), positions))
    # INT8 weights: an error, but a small one.
    assert 0 < np.abs(logits[0] - logits[1]).max() < 0.05 * np.abs(logits[0]).max()
