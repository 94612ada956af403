"""Engines whose cache is in delta form, run by a stand-in for TensorRT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import CONTEXT_LENGTH
from kvgraph.export.passes.slice_cache import slice_cache
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibrated_plan import calibrate_plan
from kvgraph.quant.calibration_data import check_sequences
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.plan import GraphPlan, QuantizationPlan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import Recipe
from kvgraph.quant.scheme import CacheScheme
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Session

# The same graph over fewer slots: the order of sums differs; what lies between two codes then falls to either.
MEAN_TOLERANCE = 1e-3

OpenFake = Callable[..., Any]


@pytest.fixture(scope="module")
def bundle(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """A tiny Llama with an INT8 cache."""
    source = exported(tiny_llama(max_position_embeddings=256), dtype="float32")
    return quantized(source, CacheScheme("int8", "head"), tmp_path_factory.mktemp("int8"))


def quantized(source: Bundle, scheme: CacheScheme, folder: Path) -> Bundle:
    random = np.random.default_rng(11)
    graph = GraphPlan(Recipe("float", kv_cache=scheme))
    data = check_sequences([random.integers(0, 97, 60) for _ in range(4)], source, "random")
    with BundleWeights(source) as weights:
        model = LayerwiseModel(source, weights, data)
        plan = calibrate_plan(model, QuantizationPlan(graph, graph), folder / "statistics")
        return quantize_bundle(source, plan, folder / "bundle")


def steps(session: Session, lengths: list[int], new_tokens: int) -> list[np.ndarray]:
    """Logits of a batch with rows of unequal length, and the codes that its rows have in common."""
    random = np.random.default_rng(1)
    cache, past = session.allocate_cache(len(lengths)), np.array(lengths)
    ids = random.integers(0, 97, (len(lengths), max(lengths)))
    found = [session.prefill(cache, ids, np.zeros_like(past), past[:, None] - 1).copy()]
    for _ in range(new_tokens):
        found.append(session.decode(cache, random.integers(0, 97, (len(lengths), 1)), past).copy())
        past = past + 1
    shortest = min(lengths) + new_tokens
    return [*found, *(cache.read(tensor.name)[:, :, :shortest] for tensor in session.contract.state)]


@pytest.mark.parametrize("engines", ["one", "two"])
def test_steps_are_those_of_onnx_runtime(bundle: Bundle, open_fake: OpenFake, engines: str) -> None:
    session, gpu, _ = open_fake(bundle, max_batch=3, max_context=128, prefill_chunk=16, engines=engines)
    # From the bucket of 64 slots to that of 128; the prompt in four chunks.
    found, expected = (steps(one, [60, 1, 7], 10) for one in (session, OrtSession(bundle)))
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert np.abs(one - other).mean() <= MEAN_TOLERANCE, index
    assert gpu.launched > 0


def test_new_entries_alone_are_copied(bundle: Bundle, open_fake: OpenFake) -> None:
    session, gpu, _ = open_fake(bundle, max_batch=2, max_context=64)
    cache = session.allocate_cache(2)
    session.decode(cache, np.array([[1], [2]]), np.array([0, 0]))
    # One slot of two rows: 2 layers, keys and values, 2 heads of 8 codes each.
    assert gpu.copied == 2 * 2 * 2 * 2 * 8


def test_a_step_reads_the_cache_up_to_the_context(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle, max_context=128)
    for graph in session._target.graphs.values():
        assert "context_length" in graph.shapes


def test_float8_codes_are_read_whole_and_cut_behind_what_reads_them(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path], tmp_path: Path
) -> None:
    source = exported(tiny_llama(max_position_embeddings=256), dtype="float32")
    bundle = quantized(source, CacheScheme("float8_e4m3fn", "tensor"), tmp_path)
    model = ir.from_proto(onnx.load(bundle.graph_path("decode"), load_external_data=False))
    assert slice_cache(model, bundle.contract)
    for value in model.graph.inputs:
        if value.name.startswith("past_key_values."):
            (reader,) = (use.node for use in value.uses())
            assert reader.op_type == "DequantizeLinear"
            (cut,) = (use.node for use in reader.outputs[0].uses())
            assert (cut.op_type, cut.inputs[2].name) == ("Slice", CONTEXT_LENGTH)


def test_beams_move_rows_of_codes(bundle: Bundle, open_fake: OpenFake) -> None:
    session, _, _ = open_fake(bundle, max_batch=3, max_context=64)
    params = GenerationParams(num_beams=3, max_new_tokens=8, eos_token_ids=(2, 7))
    found, expected = (generate(one, [[7, 8, 9]], params) for one in (session, OrtSession(bundle)))
    assert [text.token_ids for text in found] == [text.token_ids for text in expected]
