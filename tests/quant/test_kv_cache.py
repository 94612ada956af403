"""INT8 and FP8 caches in delta form: what the graphs promise, beside float ones and in both runtimes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, PAST_LENGTH, past_key
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibrated_plan import calibrate_plan
from kvgraph.quant.calibration_data import check_sequences
from kvgraph.quant.kv_cache import delta_contract, quantize_cache
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.plan import (
    CacheRange,
    GraphPlan,
    QuantizationPlan,
    parse_plan,
    with_cache,
)
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import load_recipe
from kvgraph.quant.scheme import CacheScheme
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

# The same graph over other splits: only the order of sums differs, and what lies between two codes may fall to either.
SPLIT_TOLERANCE = 1e-3

MAXIMUM = {"int8": 127.0, "float8_e4m3fn": 448.0}
INT8, INT8_HEAD, INT8_CHANNEL = (CacheScheme("int8", each) for each in ("tensor", "head", "channel"))
FP8 = CacheScheme("float8_e4m3fn", "tensor")
# What `--kv-cache` asks for.
UNROTATED = [replace(INT8_CHANNEL, keys="unrotated"), replace(FP8, keys="unrotated")]


def name_of(scheme: CacheScheme) -> str:
    return f"{scheme.format} {scheme.granularity} {scheme.keys}"


WINDOWED = {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize("scheme", [INT8_CHANNEL, FP8, *UNROTATED], ids=name_of)
def test_every_split_gives_the_same_logits(
    tiny: Bundle,
    cached: Callable[..., Bundle],
    teacher_forced: Callable[..., Floats],
    scheme: CacheScheme,
) -> None:
    session = OrtSession(cached(tiny, scheme), threads=1)
    ids = np.random.default_rng(6).integers(0, 97, (1, 16))
    whole = teacher_forced(session, ids, [16])
    for split in range(2, 16):
        errors = np.abs(teacher_forced(session, ids, [split, *[1] * (16 - split)]) - whole)
        assert float(errors.mean()) < SPLIT_TOLERANCE


def test_rows_of_unequal_length_are_as_if_alone(
    tiny: Bundle, cached: Callable[..., Bundle], cache_scheme: CacheScheme
) -> None:
    session = OrtSession(cached(tiny, cache_scheme), threads=1)
    random = np.random.default_rng(7)
    lengths = np.array([1, 3, 9])
    ids = random.integers(0, 97, (3, 9))
    following = random.integers(0, 97, (3, 4))

    def run(rows: Ids) -> Floats:
        own = lengths[rows]
        cache = session.allocate_cache(len(rows))
        padded = ids[rows][:, : own.max()]
        parts = [session.prefill(cache, padded, np.zeros(len(rows), np.int64), own[:, None] - 1).copy()]
        for step in range(4):
            parts.append(session.decode(cache, following[rows, step : step + 1], own + step).copy())
        return np.concatenate(parts, axis=1)

    together = run(np.arange(3))
    for row in range(3):
        alone = run(np.array([row]))[0]
        assert float(np.abs(together[row] - alone).mean()) < SPLIT_TOLERANCE


FAMILIES: dict[str, dict[str, Any]] = {
    # ALiBi: masks are float, and built from distances.
    "bloom": {"hidden_size": 32, "intermediate_size": 128, "num_key_value_heads": 4},
    # A part of each head turns.
    "phi": {
        "hidden_size": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    # Neighbouring channels turn together.
    "cohere": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "hidden_size": 32,
        "logit_scale": 1.0,
    },
    # Soft caps: attention is written out, and windows are in every other layer.
    "gemma2": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 7,
        "hidden_size": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
        "sliding_window": 5,
    },
}


def fine_ranges(bundle: Bundle, scheme: CacheScheme, offset: float) -> dict[str, CacheRange]:
    """Wide enough for anything; keys lose a constant, which has to come back or not to matter."""
    ranges = {}
    for tensor in bundle.contract.state:
        shape = (int(tensor.shape[1]), int(tensor.shape[3]))
        scale = np.full(shape, 40 / MAXIMUM[scheme.format], np.float32)
        scale = {"tensor": scale[0, 0], "head": scale[:, 0], "channel": scale}[scheme.granularity]
        key = tensor.role == "key"
        offsets = np.full(shape, offset if key else 0.0, np.float32)
        ranges[tensor.name] = CacheRange(np.asarray(scale), offsets, key and scheme.keys == "unrotated")
    return ranges


@pytest.mark.parametrize("scheme", [INT8, INT8_HEAD, INT8_CHANNEL, UNROTATED[0]], ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_masks_and_forms_of_attention_follow(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    teacher_forced: Callable[..., Floats],
    family: str,
    scheme: CacheScheme,
) -> None:
    """Beside the float graph, whose logits a coarse cache moves by little and a wrong mask by much."""
    bundle = exported(tiny_checkpoint(family, **FAMILIES[family]), dtype="float32")
    graphs = {}
    for graph in GRAPHS:
        model = ir.load(bundle.graph_path(graph))
        quantize_cache(model, bundle.contract, scheme, fine_ranges(bundle, scheme, 0.7))
        graphs[graph] = ir.to_proto(model).SerializeToString()
    session = OrtSession(bundle, threads=1, graphs=graphs, contract=delta_contract(bundle.contract, scheme))
    ids = np.random.default_rng(5).integers(0, 97, (2, 24))
    sizes = [7, 5, *[1] * 12]
    exact = teacher_forced(OrtSession(bundle, threads=1), ids, sizes)
    found = teacher_forced(session, ids, sizes)
    assert float(np.abs(found - exact).mean()) < 0.1 * float(exact.std())
    # A window off by one, or a slot that shows, is seen in the last tokens most.
    assert float(np.abs(found[:, -4:] - exact[:, -4:]).max()) < 0.7 * float(exact.std())


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_masks_show_what_the_contract_says(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    cached: Callable[..., Bundle],
    family: str,
    graph: Any,
) -> None:
    """Past slot j is visible iff j < past_length, new key i to new query s iff i <= s; windows by positions."""
    bundle = cached(
        exported(tiny_checkpoint(family, **(WINDOWED if family == "mistral" else {})), dtype="float32"),
        INT8,
    )
    model = ir.load(bundle.graph_path(graph))
    attention = next(node for node in model.graph if node.op_type == "Attention")
    mask = attention.inputs[3]
    assert mask is not None
    inputs = {value.name: value for value in model.graph.inputs}
    needed = [inputs["input_ids"], inputs[PAST_LENGTH], inputs[past_key(0)]]
    part = ir.convenience.extract(model.graph, needed, [mask])
    session = onnxruntime.InferenceSession(
        ir.to_proto(ir.Model(part, ir_version=11)).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    new, slots, past = (1 if graph == "decode" else 4), 12, np.array([0, 3, 8])
    feeds = {
        "input_ids": np.zeros((3, new), np.int64),
        PAST_LENGTH: past,
        past_key(0): np.zeros((3, 2, slots, 8), np.int8),
    }
    (found,) = session.run(None, feeds)
    expected = np.zeros((3, 1, new, slots + new), bool)
    for row in range(3):
        for query in range(new):
            for key in range(slots + new):
                written = key < past[row] if key < slots else key - slots <= query
                position = key if key < slots else past[row] + key - slots
                near = family == "llama" or position > past[row] + query - 5
                expected[row, 0, query, key] = written and near
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_graphs_are_checked_and_build_for_tensorrt(
    tiny_llama: Callable[..., Path],
    exported: Callable[..., Bundle],
    cached: Callable[..., Bundle],
    dtype: str,
    cache_scheme: CacheScheme,
) -> None:
    bundle = cached(exported(tiny_llama(), dtype=dtype), cache_scheme)
    for graph in GRAPHS:
        onnx.checker.check_model(str(bundle.graph_path(graph)), full_check=True)
        found = onnx.load(bundle.graph_path(graph), load_external_data=False)
        assert {node.domain for node in found.graph.node} == {""}
        assert "TensorScatter" not in {node.op_type for node in found.graph.node}
    target = build_tensorrt(bundle, "tensorrt-rtx", TensorRTOptions(max_batch=2, compute_capabilities=(89,)))
    assert target.compute_capabilities == (89,)


def test_the_contract_says_what_the_buffers_are(tiny: Bundle, cached: Callable[..., Bundle]) -> None:
    bundle = cached(tiny, INT8)
    assert [tensor.name for tensor in bundle.contract.state] == [
        tensor.name for tensor in tiny.contract.state
    ]
    for tensor in bundle.contract.state:
        assert (tensor.form, tensor.dtype) == ("delta", "int8")
        assert tensor.output_shape == ("B", 2, "S", 8)
    assert {tensor.dtype for tensor in cached(tiny, FP8).contract.state} == {"float8e4m3fn"}


def test_it_goes_on_top_of_other_recipes(
    tiny: Bundle, cached: Callable[..., Bundle], teacher_forced: Callable[..., Floats]
) -> None:
    bundle = cached(tiny, INT8_CHANNEL, load_recipe("int8-wo"))
    assert bundle.weights["model.layers.0.mlp.up_proj.weight"]["dtype"] == "int8"
    assert bundle.recipe is not None
    scheme = {"format": "int8", "granularity": "channel", "keys": "rotated", "scale_form": "float"}
    assert bundle.recipe["prefill"]["kv_cache"] == scheme
    ids = np.random.default_rng(5).integers(0, 97, (2, 20))
    plain = teacher_forced(OrtSession(tiny, threads=1), ids, [12, *[1] * 8])
    found = teacher_forced(OrtSession(bundle, threads=1), ids, [12, *[1] * 8])
    assert float(np.abs(plain - found).mean()) < 0.1 * float(plain.std())


def test_keys_whose_angles_depend_on_other_lengths_are_kept_as_they_are(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle], cached: Callable[..., Bundle]
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    bundle = exported(tiny_llama(rope_parameters=rope), dtype="float32")
    for scheme in UNROTATED:
        found = ir.load(cached(bundle, scheme).graph_path("decode"))
        rotations = [node.inputs[0] for node in found.graph if node.op_type == "RotaryEmbedding"]
        # Of queries and of new keys.
        assert [value.shape[2] for value in rotations if value is not None and value.shape is not None] == [
            1
        ] * 4


def test_both_graphs_have_one_cache(tiny: Bundle, tmp_path: Path) -> None:
    data = check_sequences([np.arange(40)], tiny, "test")
    plan = QuantizationPlan(
        GraphPlan(replace(load_recipe("int8-wo"), kv_cache=INT8)), GraphPlan(load_recipe("int8-wo"))
    )
    with (
        BundleWeights(tiny) as weights,
        pytest.raises(ValueError, match="both graphs read one cache"),
    ):
        calibrate_plan(LayerwiseModel(tiny, weights, data), plan, tmp_path)
    split = with_cache(parse_plan("prefill=int8-wo,decode=int4-wo"), "int8")
    with BundleWeights(tiny) as weights:
        complete = calibrate_plan(LayerwiseModel(tiny, weights, data), split, tmp_path)
    bundle = quantize_bundle(tiny, complete, tmp_path / "out")
    assert {tensor.form for tensor in bundle.contract.state} == {"delta"}


def test_a_cache_that_something_else_reads_is_refused(tiny: Bundle) -> None:
    model = ir.load(tiny.graph_path("decode"))
    past = next(value for value in model.graph.inputs if value.name == past_key(0))
    stray = ir.Node("", "Neg", [past], name="stray")
    model.graph.append(stray)
    ranges = fine_ranges(tiny, INT8, 0.0)
    with pytest.raises(ValueError, match=r"present\.0\.key' is not written by one TensorScatter"):
        quantize_cache(model, tiny.contract, INT8, ranges)
