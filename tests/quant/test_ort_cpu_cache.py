"""Quantized caches in kvgraph's CPU kernels, beside the canonical graphs in delta form under ONNX Runtime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.ort_cpu import build_ort_cpu
from kvgraph.quant.plan import CacheRange, GraphPlan, QuantizationPlan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import Recipe
from kvgraph.quant.scheme import CacheScheme
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.kernels import library_path
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Session

pytestmark = pytest.mark.skipif(
    library_path() is None, reason="kvgraph's CPU kernels are not compiled in this installation"
)

# The same codes on both sides, but where a value lies between two of them: then one may fall to either.
MEAN_TOLERANCE, MOST_TOLERANCE = 2e-3, 0.3
MAXIMUM = {"int8": 127.0, "float8_e4m3fn": 448.0}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SCHEMES = [
    CacheScheme(form, granularity, keys)  # type: ignore[arg-type]
    for form in MAXIMUM
    for granularity in ("tensor", "head", "channel")
    for keys in ("rotated", "unrotated")
]
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5, "rope_parameters": ROPE},
    # Norms of each head.
    "qwen3": {"rope_parameters": ROPE},
    # A part of each head turns.
    "phi": {
        "hidden_size": 32,
        "intermediate_size": 128,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    },
    # Neighbouring channels turn together.
    "cohere": {"rope_parameters": ROPE, "tie_word_embeddings": True, "hidden_size": 32, "logit_scale": 1.0},
}


def with_cache(bundle: Bundle, scheme: CacheScheme, output: Path) -> Bundle:
    """The bundle with a quantized cache of random ranges, wide enough for most that the tiny models give."""
    random, ranges = np.random.default_rng(3), {}
    for tensor in bundle.contract.state:
        heads, channels = int(tensor.shape[1]), int(tensor.shape[3])
        whole = random.uniform(2, 5, (heads, channels)).astype(np.float32) / np.float32(
            MAXIMUM[scheme.format]
        )
        scale = {"tensor": whole[0, 0], "head": whole[:, 0], "channel": whole}[scheme.granularity]
        key = tensor.role == "key"
        offset = random.uniform(-1, 1, whole.shape).astype(np.float32) if key else np.zeros_like(whole)
        ranges[tensor.name] = CacheRange(np.asarray(scale), offset, key and scheme.keys == "unrotated")
    plan = GraphPlan(replace(Recipe("float"), kv_cache=scheme))
    return quantize_bundle(bundle, QuantizationPlan(plan, plan, ranges), output)


def logits(session: Session, vocabulary: int) -> Floats:
    """Of two rows of unequal length, after two chunks and twelve steps."""
    ids = np.random.default_rng(2).integers(0, vocabulary, (2, 24))
    cache, lengths = session.allocate_cache(2, 28), np.array([9, 6])
    parts = [session.prefill(cache, ids[:, :9], np.zeros(2, np.int64), lengths[:, None] - 1).copy()]
    parts.append(session.prefill(cache, ids[:, 9:12], lengths, np.tile(np.arange(3), (2, 1))).copy())
    for step in range(12):
        parts.append(session.decode(cache, ids[:, 12 + step : 13 + step], lengths + 3 + step).copy())
    return np.concatenate(parts, axis=1)


def check(bundle: Bundle) -> None:
    target = build_ort_cpu(bundle)
    assert {(tensor.form, tensor.dtype) for tensor in target.contract.state} == {
        ("scatter", tensor.dtype) for tensor in bundle.contract.state
    }
    graph = onnx.load(target.graph_path("prefill"), load_external_data=False).graph
    counts = Counter(node.op_type for node in graph.node)
    assert counts["CachedAttention"] == bundle.contract.num_layers
    assert not counts.keys() & {"Attention", "QuantizeLinear", "DequantizeLinear", "RotaryEmbedding"}
    errors = np.abs(
        logits(open_session(bundle, "ort-cpu", threads=1), bundle.contract.vocab_size)
        - logits(OrtSession(bundle, threads=1), bundle.contract.vocab_size)
    )
    assert float(errors.mean()) < MEAN_TOLERANCE
    assert float(errors.max()) < MOST_TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.format}-{s.granularity}-{s.keys}")
def test_equals_the_canonical_graphs(scheme: CacheScheme, tiny: Bundle, tmp_path: Path) -> None:
    check(with_cache(tiny, scheme, tmp_path / "bundle"))


@pytest.mark.parametrize("scheme", [SCHEMES[4], SCHEMES[5]], ids=lambda s: s.keys)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_forms_of_attention(
    family: str,
    scheme: CacheScheme,
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    tmp_path: Path,
) -> None:
    bundle = exported(tiny_checkpoint(family, **FAMILIES[family]), dtype="float32")
    check(with_cache(bundle, scheme, tmp_path / "bundle"))


def test_generates_what_the_canonical_graphs_do(
    repository: Path, exported: Callable[..., Bundle], tmp_path: Path
) -> None:
    """Greedy text and beams, whose rows are gathered, of the trained model."""
    bundle = exported(repository / "tests" / "tiny_model" / "model")
    bundle = with_cache(bundle, CacheScheme("int8", "channel", "unrotated"), tmp_path / "bundle")
    build_ort_cpu(bundle)
    sessions = [open_session(bundle, "ort-cpu", threads=1), OrtSession(bundle, threads=1)]
    for params in (GenerationParams(max_new_tokens=30), GenerationParams(max_new_tokens=20, num_beams=3)):
        stories = [[one.token_ids for one in generate(s, [[1, 45, 230, 17]], params)] for s in sessions]
        assert stories[0] == stories[1]
