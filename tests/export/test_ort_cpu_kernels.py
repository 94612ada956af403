"""The ort-cpu target in kvgraph's own kernels: what is written, and that it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors import safe_open

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.targets import ort_cpu
from kvgraph.export.targets.ort_cpu import build_ort_cpu
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.runtime import open as runtime_open
from kvgraph.runtime.kernels import library_path
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids, Session
from kvgraph.runtime.target import Target

pytestmark = pytest.mark.skipif(
    library_path() is None, reason="kvgraph's CPU kernels are not compiled in this installation"
)

# float32 sums in another order.
TOLERANCE = 1e-4
NODES_A_LAYER = 7

TinyLlama = Callable[..., Path]
Exported = Callable[..., Bundle]


@pytest.fixture(scope="session")
def bundle(exported: Exported, tiny_llama: TinyLlama) -> Bundle:
    return exported(tiny_llama(tie_word_embeddings=True), dtype="float32")


@pytest.fixture(scope="session")
def target(bundle: Bundle) -> Target:
    return build_ort_cpu(bundle)


def test_one_graph_serves_both(target: Target) -> None:
    assert sorted(target.files) == ["prefill.onnx", WEIGHTS_FILE]
    assert {graph.source for graph in target.graphs.values()} == {"prefill"}
    assert target.options == {"kernels": "kvgraph"}


def test_a_layer_has_seven_nodes(target: Target) -> None:
    graph = onnx.load(target.graph_path("prefill"), load_external_data=False).graph
    counts = Counter(node.op_type for node in graph.node)
    assert counts["PackedLinear"] == 4 * 2 + 1
    assert counts["CachedAttention"] == 2
    assert counts["PackedGather"] == 1
    in_layers = [node for node in graph.node if node.name.startswith("layers.1/")]
    assert len(in_layers) == NODES_A_LAYER
    # Masks are the kernel's matter.
    assert not {"LessOrEqual", "And", "Attention", "MatMul", "Gemm"} & set(counts)


def test_the_tied_table_is_stored_once(target: Target) -> None:
    with safe_open(target.path / WEIGHTS_FILE, "np") as file:
        sizes = {name: file.get_slice(name).get_shape()[0] for name in file.keys()}  # noqa: SIM118
    tables = [name for name in sizes if "embed_tokens" in name or "lm_head" in name]
    assert tables == ["model.embed_tokens.weight/packed"]
    # 97 columns are 7 panels.
    assert sizes[tables[0]] == 7 * 16 * 20 * 4


def test_unequal_rows_and_chunks_equal_the_canonical_graphs(
    bundle: Bundle,
    kernels: Callable[[Bundle], Session],
    ort: Callable[..., OrtSession],
    ragged: Callable[..., Floats],
    teacher_forced: Callable[..., Floats],
    random_ids: Callable[..., Ids],
) -> None:
    ids = random_ids(3, 40)
    for run in (
        lambda session: ragged(session, ids, [1, 17, 9], 20),
        lambda session: teacher_forced(session, ids, [7, 12, *[1] * 21]),
    ):
        np.testing.assert_allclose(run(kernels(bundle)), run(ort(bundle)), atol=TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_stay_as_they_are(
    dtype: str, exported: Exported, tiny_llama: TinyLlama, bundle: Bundle, target: Target
) -> None:
    half = build_ort_cpu(exported(tiny_llama(tie_word_embeddings=True), dtype=dtype))
    graph = onnx.load(half.graph_path("prefill"), load_external_data=False).graph
    formats = {
        attribute.s.decode()
        for node in graph.node
        for attribute in node.attribute
        if node.domain == "kvgraph" and attribute.name == "format"
    }
    assert formats == {dtype}
    assert {tensor.dtype for tensor in half.contract.state} == {"float32"}
    assert half.files[WEIGHTS_FILE].size < 0.6 * target.files[WEIGHTS_FILE].size


def test_float16_equals_float32_over_rounded_weights(
    exported: Exported,
    tiny_llama: TinyLlama,
    kernels: Callable[[Bundle], Session],
    teacher_forced: Callable[..., Floats],
    random_ids: Callable[..., Ids],
) -> None:
    bundle = exported(tiny_llama(tie_word_embeddings=True), dtype="float16")
    ids = random_ids(2, 12)
    found = teacher_forced(kernels(bundle), ids, [5, 3, *[1] * 4])
    expected = teacher_forced(OrtSession(bundle, threads=1), ids, [5, 3, *[1] * 4])
    # The canonical graphs round to 11 bits after every node.
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_scales_of_float16_products_are_left_out_in_float32(
    exported: Exported,
    tiny_llama: TinyLlama,
    kernels: Callable[[Bundle], Session],
    teacher_forced: Callable[..., Floats],
    random_ids: Callable[..., Ids],
) -> None:
    checkpoint = tiny_llama(tie_word_embeddings=True)
    wide, half = (exported(checkpoint, dtype="float16", residual_dtype=kind) for kind in ("float32", None))
    ids = random_ids(2, 12)
    found, expected = (teacher_forced(kernels(one), ids, [5, 3, *[1] * 4]) for one in (wide, half))
    # The same operators over the same weights.
    np.testing.assert_array_equal(found, expected)
    graph = onnx.load(wide.target_path("ort-cpu") / "prefill.onnx", load_external_data=False).graph
    assert len([node for node in graph.node if node.name.startswith("layers.1/")]) == NODES_A_LAYER


def test_one_capacity_written_in(
    exported: Exported,
    tiny_llama: TinyLlama,
    bundle: Bundle,
    kernels: Callable[[Bundle], Session],
    teacher_forced: Callable[..., Floats],
    random_ids: Callable[..., Ids],
) -> None:
    fixed = exported(tiny_llama(tie_word_embeddings=True), dtype="float32", capacity=32)
    ids = random_ids(2, 12)
    found = teacher_forced(kernels(fixed), ids, [9, *[1] * 3])
    counts = Counter(
        node.op_type
        for node in onnx.load(
            fixed.target_path("ort-cpu") / "prefill.onnx", load_external_data=False
        ).graph.node
    )
    assert counts["CachedAttention"] == 2
    expected = teacher_forced(kernels(bundle), ids, [9, *[1] * 3])
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_residuals_are_still_outputs(
    exported: Exported, tiny_llama: TinyLlama, random_ids: Callable[..., Ids], ort: Callable[..., OrtSession]
) -> None:
    bundle = exported(tiny_llama(tie_word_embeddings=True), dtype="float32", debug_outputs=True)
    target = build_ort_cpu(bundle)
    session = OrtSession(
        bundle,
        threads=1,
        debug_outputs=True,
        graphs={"prefill": target.graph_path("prefill").read_bytes()},
        folder=target.path,
        library=library_path(),
    )
    hidden = []
    for one in (session, ort(bundle, True)):
        cache = one.allocate_cache(1, 8)
        one.prefill(cache, random_ids(1, 5), np.array([0]), np.array([[4]]))
        one.decode(cache, random_ids(1, 1), np.array([5]))
        hidden.append(one.hidden_states())
    assert len(hidden[0]) == 3
    for found, expected in zip(*hidden, strict=True):
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def test_a_cache_that_grows_keeps_its_content(
    bundle: Bundle, kernels: Callable[[Bundle], Session], ort: Callable[..., OrtSession], random_ids: Any
) -> None:
    ids = random_ids(1, 63)
    logits = []
    for session in (kernels(bundle), ort(bundle)):
        cache = session.allocate_cache(1, 64)
        session.prefill(cache, ids[:, :30], np.array([0]), np.array([[29]]))
        for position in range(30, 63):
            last = session.decode(cache, ids[:, position : position + 1], np.array([position])).copy()
        logits.append(last)
    np.testing.assert_allclose(logits[0], logits[1], atol=TOLERANCE)


def test_a_missing_library_is_said_at_once(
    bundle: Bundle, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_open, "library_path", lambda: None)
    with pytest.raises(RuntimeError, match=r"which this installation lacks.* --kernels onnxruntime"):
        open_session(bundle, "ort-cpu")


def test_without_the_library_the_plain_form_is_built(
    exported: Exported, tiny_llama: TinyLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = exported(tiny_llama(), dtype="bfloat16")
    monkeypatch.setattr(ort_cpu, "library_path", lambda: None)
    monkeypatch.setattr(runtime_open, "library_path", lambda: None)
    lines: list[str] = []
    built = build_ort_cpu(bundle, report=lines.append)
    assert built.options == {"kernels": "onnxruntime"}
    assert "kvgraph's CPU kernels are not in this installation" in lines[0]
    session = open_session(bundle, "ort-cpu")
    assert np.isfinite(
        session.prefill(session.allocate_cache(1, 4), np.array([[1, 2]]), np.array([0]), np.array([[1]]))
    ).all()


def test_the_command_says_how_much_memory_the_weights_take(
    bundle: Bundle, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(bundle.path), "--target", "ort-cpu"]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert first == "weights 0.1 MB, one copy for prefill and decode"
    assert "targets/ort-cpu: ort-cpu 1." in second


def test_kernels_are_for_one_target(bundle: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", str(bundle.path), "--target", "tensorrt-rtx", "--kernels", "kvgraph"]
    assert main(arguments) == 2
    assert "--kernels is for ort-cpu" in capfd.readouterr().err
