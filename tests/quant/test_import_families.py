"""Imported checkpoints of families that store their weights in other ways, and GGUF files; and the command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.exporter import ExportOptions
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.quant.importer import import_checkpoint
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats

# Sums in another order; logits reach 10.
TOLERANCE = 1e-4
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ADA = TensorRTOptions(max_context=16, prefill_chunk=4, compute_capabilities=(89,))
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any], Callable[[ModuleType], Any]]] = {
    "fused projections, inputs in an order": (
        "phi3",
        {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64, "sliding_window": None},
        lambda make: (make.gptq(seed=2), make.gptq_settings(ordered=True)),
    ),
    "biases, tied head": (
        "qwen2",
        {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True, "rope_parameters": ROPE},
        lambda make: (make.awq(), make.awq_settings()),
    ),
    "experts": (
        "mixtral",
        {
            **SIZES,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rope_parameters": ROPE,
        },
        lambda make: (
            make.compressed("pack-quantized", INT4),
            make.compressed_settings("pack-quantized", INT4),
        ),
    ),
}


@pytest.fixture(scope="module")
def run_import(quick_tracing: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    def run(checkpoint: Path, **options: Any) -> Bundle:
        output = tmp_path_factory.mktemp("imported") / "bundle"
        return import_checkpoint(open_checkpoint(checkpoint), output, ExportOptions(**options))

    return run


def logits(session: OrtSession) -> Floats:
    """Of a prefill of five tokens and a decode step."""
    ids = np.array([[5, 61, 3, 17, 40, 8]])
    cache = session.allocate_cache(1)
    first = session.prefill(cache, ids[:, :5], np.zeros(1, np.int64), np.arange(5)[None]).copy()
    return np.concatenate([first, session.decode(cache, ids[:, 5:], np.array([5]))], axis=1)


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_are_those_of_the_float_checkpoint(
    case: str,
    tiny_checkpoint: Callable[..., Path],
    packers: ModuleType,
    tmp_path: Path,
    run_import: Callable[..., Bundle],
    exported: Callable[..., Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    model_type, config, make = FAMILIES[case]
    source = tiny_checkpoint(model_type, **config)
    checkpoint, stands_for = packers.pack_checkpoint(source, tmp_path, *make(packers))
    bundle = run_import(checkpoint)
    assert "int4" in {entry["dtype"] for entry in bundle.weights.values()}
    expected = logits(run_exactly(exported(stands_for)))
    np.testing.assert_allclose(logits(run_exactly(bundle)), expected, rtol=0, atol=TOLERANCE)


def test_products_that_share_an_input_share_its_order(
    tiny_checkpoint: Callable[..., Path],
    packers: ModuleType,
    tmp_path: Path,
    run_import: Callable[..., Bundle],
) -> None:
    source = tiny_checkpoint("llama", **SIZES, num_hidden_layers=1)
    pack, settings = packers.gptq(seed=2), packers.gptq_settings(ordered=True)
    bundle = run_import(packers.pack_checkpoint(source, tmp_path, pack, settings)[0])
    model = onnx.load(bundle.graph_path("decode"), load_external_data=False)
    gathered = [node for node in model.graph.node if "input_order" in "".join(node.input[1:])]
    # One each for the attention block, its output, the feed-forward part and its output.
    assert len(gathered) == 4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_of_a_gguf_file_are_kept_if_asked_to(
    kind: str,
    tiny_checkpoint: Callable[..., Path],
    write_gguf: Callable[..., object],
    tmp_path: Path,
    quick_tracing: None,
    run_exactly: Callable[[Bundle], OrtSession],
) -> None:
    file = tmp_path / "model.gguf"
    source = tiny_checkpoint("llama", **SIZES, tie_word_embeddings=True)
    write_gguf(source, file, gguf.GGMLQuantizationType[kind])
    kept, plain = tmp_path / "kept", tmp_path / "float"
    assert main(["export", str(file), "-o", str(kept), "--keep-quantized"]) == 0
    assert main(["export", str(file), "-o", str(plain)]) == 0
    bundle = Bundle.open(kept)
    element = {"Q8_0": "int8", "Q4_0": "int4"}[kind]
    assert bundle.weights["model.embed_tokens.weight"]["dtype"] == element
    assert bundle.weights["model.layers.0.self_attn.q_proj.weight"]["dtype"] == element
    expected = logits(run_exactly(Bundle.open(plain)))
    np.testing.assert_allclose(logits(run_exactly(bundle)), expected, rtol=0, atol=TOLERANCE)
    half = import_checkpoint(open_checkpoint(file), tmp_path / "half", ExportOptions(dtype="float16"))
    assert [*build_tensorrt(half, "tensorrt-rtx", ADA).files] == ["model.engine"]


def test_the_command_keeps_what_a_directory_has_quantized(
    tiny_checkpoint: Callable[..., Path],
    packers: ModuleType,
    tmp_path: Path,
    quick_tracing: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tiny_checkpoint("llama", **SIZES)
    checkpoint, _ = packers.pack_checkpoint(source, tmp_path, packers.gptq(), packers.gptq_settings())
    kept, plain = str(tmp_path / "kept"), str(tmp_path / "plain")
    assert main(["export", str(checkpoint), "-o", kept]) == 0
    assert "float32, weights as gptq has them" in capsys.readouterr().out
    assert main(["export", str(checkpoint), "-o", plain, "--no-keep-quantized"]) == 0
    assert Bundle.open(plain).recipe is None
    assert main(["compare", kept, "--against", plain, "--prefill", "6", "--steps", "4"]) == 0
    assert main(["compare", kept, "--prefill", "6", "--steps", "4"]) == 0
    assert main(["inspect", kept]) == 0


def test_graphs_alone_cannot_be_quantized_ones(
    tiny_checkpoint: Callable[..., Path],
    packers: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tiny_checkpoint("llama", **SIZES)
    checkpoint, _ = packers.pack_checkpoint(source, tmp_path, packers.gptq(), packers.gptq_settings())
    assert main(["export", str(checkpoint), "-o", str(tmp_path / "out"), "--no-weights"]) == 2
    assert "leave --no-weights out, or add --no-keep-quantized" in capsys.readouterr().err
    assert main(["export", str(source), "-o", str(tmp_path / "out"), "--keep-quantized"]) == 2
    assert "has no quantized weights to keep" in capsys.readouterr().err


def test_experts_that_differ_are_refused(
    tiny_checkpoint: Callable[..., Path], packers: ModuleType, tmp_path: Path
) -> None:
    _, config, _ = FAMILIES["experts"]
    settings = {**packers.gptq_settings(), "dynamic": {r"+:.*experts\.1\.": {"bits": 8}}}
    experts = {1: packers.gptq(8)}

    source = tiny_checkpoint("mixtral", **config)
    checkpoint = mixed(packers, source, tmp_path, experts, settings)
    with pytest.raises(ValueError, match="experts of one layer are quantized in different ways"):
        import_checkpoint(open_checkpoint(checkpoint), tmp_path / "out")


def mixed(
    packers: ModuleType, source: Path, directory: Path, experts: dict[int, Any], settings: dict[str, Any]
) -> Path:
    """A checkpoint of GPTQ in which some experts are packed in another way."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in packers.load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if ".experts." not in name:
            tensors[name] = weight
            continue
        pack = experts.get(int(name.split(".experts.")[1].split(".")[0]), packers.gptq(4))
        tensors |= {f"{module}.{suffix}": tensor for suffix, tensor in pack(weight).tensors.items()}
    directory.mkdir(exist_ok=True)
    packers.write_tensors(directory / "model.safetensors", tensors)
    config = packers.json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(packers.json.dumps({**config, "quantization_config": settings}))
    return directory


def by_blocks(x: torch.Tensor) -> torch.Tensor:
    """Every 32 entries of a token rounded to 8-bit floats in units of their largest magnitude over 448."""
    parts = x.unflatten(-1, (-1, 32))
    scale = parts.abs().amax(-1, keepdim=True) / 448
    return ((parts / scale).to(torch.float8_e4m3fn).float() * scale).reshape(x.shape)


def test_inputs_of_experts_are_rounded_if_the_checkpoint_says_so(
    tiny_checkpoint: Callable[..., Path],
    packers: ModuleType,
    tmp_path: Path,
    run_import: Callable[..., Bundle],
    run_exactly: Callable[[Bundle], OrtSession],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, config, _ = FAMILIES["experts"]
    source = tiny_checkpoint("mixtral", **config)
    pack, settings = packers.float8((32, 32)), packers.float8_settings((32, 32))
    checkpoint, stands_for = packers.pack_checkpoint(source, tmp_path, pack, settings)
    bundle = run_import(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        stands_for, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    linear, kept = torch.nn.functional.linear, (config["num_local_experts"], model.config.vocab_size)

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x if len(weight) in kept else by_blocks(x), weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", rounded)
    with torch.no_grad():
        expected = model(torch.tensor([[5, 61, 3, 17, 40, 8]])).logits.numpy()
    # Now and then a sum in another order rounds to the other side.
    np.testing.assert_allclose(logits(run_exactly(bundle)), expected, rtol=0, atol=2e-3)
