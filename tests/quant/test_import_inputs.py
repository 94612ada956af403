"""Imported checkpoints whose inputs or caches are rounded: computed as their settings say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvgraph.export.bundle import Bundle
from kvgraph.export.exporter import ExportOptions
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.quant.importer import import_checkpoint
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
IDS = np.array([[5, 61, 3, 17, 40, 8, 2, 33]])
FLOAT = {"num_bits": 8, "type": "float"}
TOKEN = {"strategy": "token", "dynamic": True}
STATIC = {"strategy": "tensor"}
# A sum in another order puts an input on the other side of a rounding boundary now and then; all logits without the
# rounding of inputs differ by more than this, which the test asserts.
TOLERANCE = 2e-3
Round = Callable[[torch.Tensor], torch.Tensor]


def by_token(x: torch.Tensor, kind: str, block: int | None = None) -> torch.Tensor:
    """Every token, or block of a token, rounded in units of its largest magnitude over the format's."""
    parts = x if block is None else x.unflatten(-1, (-1, block))
    scale = parts.abs().amax(-1, keepdim=True) / (127 if kind == "int8" else 448)
    codes = parts / scale
    rounded = codes.round() if kind == "int8" else codes.to(torch.float8_e4m3fn).float()
    return (rounded * scale).reshape(x.shape)


def by_tensor(x: torch.Tensor, kind: str, scale: float) -> torch.Tensor:
    if kind == "int8":
        return (x / scale).round().clamp(-128, 127) * scale
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def ct(make: ModuleType, form: str, weights: dict[str, Any], inputs: dict[str, Any], **kwargs: Any) -> Any:
    return make.compressed(form, weights, **kwargs), make.compressed_settings(form, weights, inputs)


CASES: dict[str, tuple[Callable[[ModuleType], Any], Round]] = {
    "int8 token": (
        lambda make: ct(
            make, "int-quantized", {"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, **TOKEN}
        ),
        lambda x: by_token(x, "int8"),
    ),
    "int8 tensor": (
        lambda make: ct(
            make,
            "int-quantized",
            {"num_bits": 8, "strategy": "channel"},
            {"num_bits": 8, **STATIC},
            input_scale=0.03,
        ),
        lambda x: by_tensor(x, "int8", float(np.float32(0.03))),
    ),
    "fp8 token": (
        lambda make: ct(make, "float-quantized", {**FLOAT, "strategy": "channel"}, {**FLOAT, **TOKEN}),
        lambda x: by_token(x, "fp8"),
    ),
    "fp8 blocks": (
        lambda make: (make.float8((32, 32)), make.float8_settings((32, 32))),
        lambda x: by_token(x, "fp8", 32),
    ),
    "fp8 tensor": (
        lambda make: (
            make.float8(None, "weight_scale", 0.01),
            {"quant_method": "fp8", "activation_scheme": "static"},
        ),
        lambda x: by_tensor(x, "fp8", float(np.float32(0.01))),
    ),
}


@pytest.fixture(scope="module")
def source(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("llama", **SIZES)


@pytest.fixture(scope="module")
def import_packed(quick_tracing: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    def run(checkpoint: Path, **options: Any) -> Bundle:
        output = tmp_path_factory.mktemp("imported") / "bundle"
        return import_checkpoint(open_checkpoint(checkpoint), output, ExportOptions(**options))

    return run


def prefill(session: OrtSession) -> Floats:
    cache = session.allocate_cache(1)
    return session.prefill(cache, IDS, np.zeros(1, np.int64), np.arange(IDS.shape[1])[None])[0].copy()


def reference(checkpoint: Path, rounded: Round) -> Floats:
    """transformers on the float checkpoint, with the input of every layer's matrices rounded."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    with torch.no_grad():
        found: Floats = model(torch.from_numpy(IDS)).logits[0].numpy()
    return found


@pytest.mark.parametrize("case", CASES)
def test_inputs_are_rounded_as_the_settings_say(
    case: str,
    source: Path,
    packers: ModuleType,
    tmp_path: Path,
    import_packed: Callable[..., Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    make, rounded = CASES[case]
    checkpoint, stands_for = packers.pack_checkpoint(source, tmp_path, *make(packers))
    logits = prefill(run_exactly(import_packed(checkpoint)))
    np.testing.assert_allclose(logits, reference(stands_for, rounded), rtol=0, atol=TOLERANCE)
    assert np.abs(logits - reference(stands_for, lambda x: x)).max() > 10 * TOLERANCE


@pytest.mark.parametrize("case", ["fp8 blocks", "fp8 tensor", "int8 tensor"])
def test_float32_scales_build_with_tensorrt_rtx(
    case: str, source: Path, packers: ModuleType, tmp_path: Path, import_packed: Callable[..., Bundle]
) -> None:
    make, _ = CASES[case]
    checkpoint, _ = packers.pack_checkpoint(source, tmp_path, *make(packers), dtype="bfloat16")
    bundle = import_packed(checkpoint, dtype="bfloat16")
    assert bundle.weights["model.layers.0.mlp.up_proj.weight_scale"]["dtype"] == "float32"
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(89,))
    assert [*build_tensorrt(bundle, "tensorrt-rtx", options).files] == ["model.engine"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modelopt_with_a_quantized_cache(
    dtype: str,
    source: Path,
    packers: ModuleType,
    tmp_path: Path,
    import_packed: Callable[..., Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    scales = {
        f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale": torch.tensor(0.01 * (layer + 1))
        for layer in range(2)
        for side in "kv"
    }
    checkpoint, _ = packers.pack_checkpoint(
        source, tmp_path, packers.float8(None, "weight_scale", 0.01), None, dtype, scales
    )
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (checkpoint / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt", "version": "0.29"}, "quantization": settings})
    )
    bundle = import_packed(checkpoint)
    assert {tensor.dtype for tensor in bundle.contract.state} == {"float8e4m3fn"}
    assert bundle.recipe is not None
    form = "float" if dtype == "float32" else "float32"
    assert bundle.recipe["decode"]["kv_cache"]["scale_form"] == form
    session = run_exactly(bundle)
    whole = prefill(session)
    cache = session.allocate_cache(1)
    session.prefill(cache, IDS[:, :5], np.zeros(1, np.int64), np.array([[4]]))
    steps = [session.decode(cache, IDS[:, n, None], np.array([n])).copy() for n in range(5, IDS.shape[1])]
    np.testing.assert_allclose(np.concatenate(steps)[:, 0], whole[5:], rtol=0, atol=5e-2)
    options = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(89,))
    assert build_tensorrt(bundle, "tensorrt-rtx", options).files
