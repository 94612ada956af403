from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from transformers import LlamaForCausalLM

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.passes.widen_floats import widen_floats
from kvgraph.export.targets.ort_cpu import KERNELS, build_ort_cpu
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession

# float32 all through, against float32 in torch.
TOLERANCE = 1e-4

Exported = Callable[..., Bundle]
TinyLlama = Callable[..., Path]


@pytest.fixture(scope="session")
def bundle(exported: Exported, tiny_llama: TinyLlama) -> Bundle:
    return exported(tiny_llama(tie_word_embeddings=True), dtype="bfloat16")


@pytest.mark.parametrize("form", KERNELS)
def test_a_bfloat16_bundle_computes_in_float32_over_rounded_weights(
    form: Any,
    bundle: Bundle,
    tiny_llama: TinyLlama,
    reference: Callable[[Path], Any],
    teacher_forced: Callable[..., Any],
    random_ids: Callable[..., Any],
    tmp_path: Path,
) -> None:
    build_ort_cpu(bundle, form)
    ids = random_ids(2, 12)
    found = teacher_forced(open_session(bundle, "ort-cpu"), ids, [5, 3, *[1] * 4])
    rounded = rounded_checkpoint(tiny_llama(tie_word_embeddings=True), tmp_path)
    with torch.no_grad():
        expected = reference(rounded)(torch.from_numpy(ids)).logits.numpy()
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def rounded_checkpoint(checkpoint: Path, output: Path) -> Path:
    """The checkpoint with its matrices rounded to bfloat16; norms are float32 in every bundle."""
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.to(torch.bfloat16).float()
    model.save_pretrained(output)
    return output


def test_the_weights_are_not_copied(bundle: Bundle) -> None:
    target = build_ort_cpu(bundle, "onnxruntime")
    assert sorted(target.files) == ["decode.onnx", "prefill.onnx"]
    assert external_data(target.graph_path("prefill")) == external_data(bundle.graph_path("prefill"))


def external_data(graph: Path) -> dict[str, tuple[Any, ...]]:
    """Where the weights of a graph lie: name -> type, file, offset, length."""
    return {
        tensor.name: (tensor.data_type, *(entry.value for entry in tensor.external_data))
        for tensor in onnx.load(graph, load_external_data=False).graph.initializer
        if tensor.external_data
    }


@pytest.mark.parametrize("form", KERNELS)
def test_the_contract_says_float32(form: Any, bundle: Bundle) -> None:
    target = build_ort_cpu(bundle, form)
    assert {tensor.dtype for tensor in target.contract.state} == {"float32"}
    assert target.compute_capabilities == ()
    assert target.limits is None


@pytest.mark.parametrize("graph", ["prefill", "decode"])
def test_no_bfloat16_is_computed(bundle: Bundle, graph: Any, tmp_path: Path) -> None:
    built = build_ort_cpu(bundle, "onnxruntime").graph_path(graph)
    # The checker looks for external data beside the graph.
    shutil.copy(bundle.path / "weights.safetensors", tmp_path)
    shutil.copy(built, tmp_path / "model.onnx")
    onnx.checker.check_model(str(tmp_path / "model.onnx"), full_check=True)
    model = ir.load(built)
    narrow = [
        value.name
        for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs))
        if value.dtype == ir.DataType.BFLOAT16
    ]
    assert narrow == []


def test_widening_is_done_once(bundle: Bundle) -> None:
    model = ir.load(bundle.graph_path("prefill"))
    assert widen_floats(model)
    assert not widen_floats(model)


def test_constants_and_casts_are_widened() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 11, opset_import: ["" : 24]>
        g (bfloat16[N] x) => (bfloat16[N] y) <int64[1] shape = {1}> {
            wide = Cast<to = 1>(x)
            narrow = Cast<to = 16>(wide)
            one = ConstantOfShape<value = bfloat16[1] {16320}>(shape)
            y = Mul(narrow, one)
        }""")
    assert widen_floats(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    _, narrow, constant, _ = model.graph
    # 16320 are the bits of 1.5.
    np.testing.assert_array_equal(constant.attributes["value"].as_tensor().numpy(), np.float32([1.5]))
    assert narrow.attributes["to"].as_int() == ir.DataType.FLOAT


def test_other_types_are_left_as_they_are(exported: Exported, tiny_llama: TinyLlama) -> None:
    bundle = exported(tiny_llama(), dtype="float32")
    target = build_ort_cpu(bundle, "onnxruntime")
    assert target.contract == bundle.contract
    ids, past = np.array([[1, 2, 3]]), np.array([0])
    sessions = (open_session(bundle, "ort-cpu"), OrtSession(bundle))
    found, expected = (one.prefill(one.allocate_cache(1), ids, past, np.array([[2]])) for one in sessions)
    np.testing.assert_array_equal(found, expected)


def test_the_command_prints_the_weights_and_the_target(
    bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(bundle.path), "--target", "ort-cpu", "--kernels", "onnxruntime"]) == 0
    output = capfd.readouterr()
    assert len(output.out.splitlines()) == 2
    assert output.out.startswith("weights 0.0 MB, the bundle's own")
    assert "targets/ort-cpu: ort-cpu 1." in output.out
    assert "CPU, decode.onnx, prefill.onnx" in output.out
    assert output.err == ""
