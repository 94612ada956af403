"""INT8 and FP8 caches in delta form, against transformers with rounded keys and values, and in both runtimes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, PAST_LENGTH, past_key, past_value
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.cache_ranges import choose_cache_range
from kvgraph.quant.calibrated_plan import calibrate_plan
from kvgraph.quant.calibration_data import check_sequences
from kvgraph.quant.kv_cache import delta_contract, quantize_cache
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.plan import (
    CacheRange,
    GraphPlan,
    QuantizationPlan,
    float_plan,
    parse_plan,
    with_cache,
)
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import Recipe, load_recipe
from kvgraph.quant.scheme import CacheScheme
from kvgraph.quant.statistics import CacheStatistics
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids

FLOAT_PERPLEXITY = 6.762
# Sums in another order; where a value lies between two codes, it may fall to either.
MEAN_TOLERANCE, MOST_TOLERANCE = 2e-3, 0.3
# The same graph over other splits: only the order of sums differs, and again what lies between two codes.
SPLIT_TOLERANCE = 1e-3

MAXIMUM = {"int8": 127.0, "float8_e4m3fn": 448.0}
SCHEMES = [
    CacheScheme(form, granularity)  # type: ignore[arg-type]
    for form in MAXIMUM
    for granularity in ("tensor", "head", "channel")
]
# What `--kv-cache` asks for.
SCHEMES += [
    CacheScheme("int8", "channel", "unrotated"),
    CacheScheme("float8_e4m3fn", "tensor", "unrotated"),
]


def name_of(scheme: CacheScheme) -> str:
    return f"{scheme.format} {scheme.granularity} {scheme.keys}"


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A bundle whose cache alone is quantized, calibrated on random tokens; each is made once."""
    made: dict[tuple[Path, CacheScheme, Recipe], Bundle] = {}

    def make(bundle: Bundle, scheme: CacheScheme, recipe: Recipe = Recipe("float")) -> Bundle:  # noqa: B008
        key = (bundle.path, scheme, recipe)
        if key not in made:
            folder = tmp_path_factory.mktemp("cached")
            random = np.random.default_rng(11)
            graph = GraphPlan(replace(recipe, kv_cache=scheme))
            data = check_sequences([random.integers(0, 97, 60) for _ in range(8)], bundle, "random")
            with BundleWeights(bundle) as weights:
                model = LayerwiseModel(bundle, weights, data)
                plan = calibrate_plan(model, QuantizationPlan(graph, graph), folder / "statistics")
                made[key] = quantize_bundle(bundle, plan, folder / "bundle")
        return made[key]

    return make


def teacher_forced(session: OrtSession, ids: Ids, sizes: Sequence[int]) -> Floats:
    """Logits [B, n, V] of ids [B, n] in chunks; those of one token are decoded."""
    cache, parts, start = session.allocate_cache(len(ids)), [], 0
    for size in sizes:
        chunk, past = ids[:, start : start + size], np.full(len(ids), start)
        if size == 1:
            parts.append(session.decode(cache, chunk, past).copy())
        else:
            parts.append(session.prefill(cache, chunk, past, np.tile(np.arange(size), (len(ids), 1))).copy())
        start += size
    return np.concatenate(parts, axis=1)


def ranges_of(bundle: Bundle) -> dict[str, CacheRange]:
    """Offset and scale of every state tensor as the decode graph applies them."""
    model = ir.load(bundle.graph_path("decode"))
    constants = {
        name: value.const_value.numpy()
        for name, value in model.graph.initializers.items()
        if value.const_value
    }
    assert bundle.recipe is not None
    unrotated = bundle.recipe["decode"]["kv_cache"]["keys"] == "unrotated"
    ranges = {}
    for tensor in bundle.contract.state:
        heads, channels = int(tensor.shape[1]), int(tensor.shape[3])
        per_channel = constants.get(f"{tensor.name}/scale.{heads}")
        scale = constants[f"{tensor.name}/scale"] if per_channel is None else per_channel[0, :, 0]
        offset = constants.get(f"{tensor.name}/offset", np.zeros((1, heads, 1, channels), np.float32))
        ranges[tensor.name] = CacheRange(scale, offset[0, :, 0], unrotated and tensor.role == "key")
    return ranges


def rounded(values: Tensor, span: CacheRange, form: str) -> Tensor:
    """Keys or values [B, K, T, D] as a quantized cache gives them back."""
    scale = torch.from_numpy(np.array(span.scale))
    heads = values.shape[1] if scale.ndim == 2 else -1
    scale = scale.reshape(1, heads, 1, -1) if scale.ndim == 2 else scale.reshape(1, heads, 1, 1)
    offset = torch.from_numpy(np.array(span.offset))[None, :, None]
    scaled = (values - offset) / scale
    if form == "int8":
        codes = scaled.round().clamp(-128, 127)
    else:
        codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return codes * scale + offset


def turned(keys: Tensor, direction: int) -> Tensor:
    """Keys [B, K, T, D] of positions 0 ... T - 1, turned by a rotary embedding of base 10000, or back."""
    half = keys.shape[-1] // 2
    angles = torch.arange(keys.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half) * direction
    first, second = keys[..., :half], keys[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def cached_keys(keys: Tensor, span: CacheRange, form: str) -> Tensor:
    """Keys [B, K, T, D] as attention reads them from a quantized cache."""
    if not span.unrotated:
        return rounded(keys, span, form)
    return turned(rounded(turned(keys, -1), span, form), 1)


def reference_logits(checkpoint: Path, ids: Ids, ranges: dict[str, CacheRange], form: str) -> Floats:
    """Of transformers, every key and value rounded before attention sees it."""

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scaling: float,
        **others: Any,
    ) -> tuple[Tensor, None]:
        layer, groups = module.layer_idx, query.shape[1] // key.shape[1]
        key = cached_keys(key, ranges[past_key(layer)], form).repeat_interleave(groups, dim=1)
        value = rounded(value, ranges[past_value(layer)], form).repeat_interleave(groups, dim=1)
        scores = query @ key.transpose(2, 3) * scaling
        length = scores.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        window = others.get("sliding_window")
        if window is not None:
            visible &= ~torch.ones(length, length, dtype=torch.bool).tril(-window)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("rounded_cache", attend)
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="rounded_cache"
    ).eval()
    with torch.no_grad():
        logits: Floats = model(torch.from_numpy(ids)).logits.numpy()
    return logits


WINDOWED = {"sliding_window": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    cached: Callable[..., Bundle],
    family: str,
    scheme: CacheScheme,
) -> None:
    checkpoint = tiny_checkpoint(family, **(WINDOWED if family == "mistral" else {}))
    bundle = cached(exported(checkpoint, dtype="float32"), scheme)
    ids = np.random.default_rng(5).integers(0, 97, (2, 30))
    expected = reference_logits(checkpoint, ids, ranges_of(bundle), scheme.format)
    # Past and new keys in every proportion: prefilled at once, in chunks, decoded.
    found = teacher_forced(OrtSession(bundle, threads=1), ids, [7, 9, 2, 4, *[1] * 8])
    errors = np.abs(found - expected)
    assert float(errors.mean()) < MEAN_TOLERANCE
    assert float(errors.max()) < MOST_TOLERANCE


@pytest.mark.parametrize("scheme", [SCHEMES[2], SCHEMES[3], *SCHEMES[-2:]], ids=name_of)
def test_every_split_gives_the_same_logits(
    tiny: Bundle, cached: Callable[..., Bundle], scheme: CacheScheme
) -> None:
    session = OrtSession(cached(tiny, scheme), threads=1)
    ids = np.random.default_rng(6).integers(0, 97, (1, 16))
    whole = teacher_forced(session, ids, [16])
    for split in range(2, 16):
        errors = np.abs(teacher_forced(session, ids, [split, *[1] * (16 - split)]) - whole)
        assert float(errors.mean()) < SPLIT_TOLERANCE


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
def test_rows_of_unequal_length_are_as_if_alone(
    tiny: Bundle, cached: Callable[..., Bundle], scheme: CacheScheme
) -> None:
    session = OrtSession(cached(tiny, scheme), threads=1)
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


@pytest.mark.parametrize("scheme", [*SCHEMES[:3], SCHEMES[-2]], ids=name_of)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_masks_and_forms_of_attention_follow(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
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
        SCHEMES[0],
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


@pytest.mark.parametrize("scheme", SCHEMES, ids=name_of)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_graphs_are_checked_and_build_for_tensorrt(
    tiny_llama: Callable[..., Path],
    exported: Callable[..., Bundle],
    cached: Callable[..., Bundle],
    dtype: str,
    scheme: CacheScheme,
) -> None:
    bundle = cached(exported(tiny_llama(), dtype=dtype), scheme)
    for graph in GRAPHS:
        onnx.checker.check_model(str(bundle.graph_path(graph)), full_check=True)
        found = onnx.load(bundle.graph_path(graph), load_external_data=False)
        assert {node.domain for node in found.graph.node} == {""}
        assert "TensorScatter" not in {node.op_type for node in found.graph.node}
    target = build_tensorrt(bundle, "tensorrt-rtx", TensorRTOptions(max_batch=2, compute_capabilities=(89,)))
    assert target.compute_capabilities == (89,)


def test_the_contract_says_what_the_buffers_are(tiny: Bundle, cached: Callable[..., Bundle]) -> None:
    bundle = cached(tiny, SCHEMES[0])
    assert [tensor.name for tensor in bundle.contract.state] == [
        tensor.name for tensor in tiny.contract.state
    ]
    for tensor in bundle.contract.state:
        assert (tensor.form, tensor.dtype) == ("delta", "int8")
        assert tensor.output_shape == ("B", 2, "S", 8)
    assert {tensor.dtype for tensor in cached(tiny, SCHEMES[3]).contract.state} == {"float8e4m3fn"}


def test_it_goes_on_top_of_other_recipes(tiny: Bundle, cached: Callable[..., Bundle]) -> None:
    bundle = cached(tiny, SCHEMES[2], load_recipe("int8-wo"))
    assert bundle.weights["model.layers.0.mlp.up_proj.weight"]["dtype"] == "int8"
    assert bundle.recipe is not None
    scheme = {"format": "int8", "granularity": "channel", "keys": "rotated", "scale_form": "float"}
    assert bundle.recipe["prefill"]["kv_cache"] == scheme
    ids = np.random.default_rng(5).integers(0, 97, (2, 20))
    plain = teacher_forced(OrtSession(tiny, threads=1), ids, [12, *[1] * 8])
    found = teacher_forced(OrtSession(bundle, threads=1), ids, [12, *[1] * 8])
    assert float(np.abs(plain - found).mean()) < 0.1 * float(plain.std())


@pytest.mark.parametrize("text", ["stories", "novel"])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_trained_model_keeps_its_perplexity(
    stories: Bundle,
    calibrated: Callable[..., Bundle],
    perplexity: Callable[[Bundle], float],
    shared_data: Path,
    text: str,
    form: Any,
) -> None:
    recipe = with_cache(float_plan(), form).prefill.recipe
    file = shared_data / "text" / "botchan_en.txt" if text == "novel" else None
    bundle = calibrated(stories, recipe, file=file)
    assert perplexity(bundle) == pytest.approx(FLOAT_PERPLEXITY, rel=0.005)


def test_keys_whose_angles_depend_on_other_lengths_are_kept_as_they_are(
    tiny_llama: Callable[..., Path], exported: Callable[..., Bundle], cached: Callable[..., Bundle]
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    bundle = exported(tiny_llama(rope_parameters=rope), dtype="float32")
    for scheme in SCHEMES[-2:]:
        found = ir.load(cached(bundle, scheme).graph_path("decode"))
        rotations = [node.inputs[0] for node in found.graph if node.op_type == "RotaryEmbedding"]
        # Of queries and of new keys.
        assert [value.shape[2] for value in rotations if value is not None and value.shape is not None] == [
            1
        ] * 4


def statistics(low: float, high: float, turned: bool) -> CacheStatistics:
    """Of two heads with two channels that all reach from `low` to `high`; pairs are longer than their channels."""
    ones = np.ones((2, 2), np.float32)
    length = max(-low, high) * (1.25 if turned else 1.0)
    return CacheStatistics(
        ones * low, ones * high, ones * (low + high) / 2, ones * length, np.full(2, turned)
    )


@pytest.mark.parametrize(
    ("form", "turned", "centred", "largest", "offset"),
    [
        ("int8", False, False, 6.0, 0.0),  # values
        ("int8", True, True, 7.5, 0.0),  # keys that turn: without its mean a channel may reach further
        ("int8", False, True, 2.0, 4.0),  # keys that do not
        # Twice what was seen.
        ("float8_e4m3fn", True, True, 23.0, 4.0),
        ("float8_e4m3fn", False, False, 12.0, 0.0),
    ],
)
def test_ranges_hold_all_that_may_come(
    form: str, turned: bool, centred: bool, largest: float, offset: float
) -> None:
    found = choose_cache_range(statistics(2.0, 6.0, turned), CacheScheme(form), centred)
    np.testing.assert_allclose(found.scale, np.full((2, 2), largest / MAXIMUM[form]), rtol=1e-6)
    np.testing.assert_array_equal(found.offset, np.full((2, 2), offset))


def test_granularities_share_the_largest_range() -> None:
    spread = statistics(0.0, 1.0, False)
    sizes = np.array([[1, 2], [3, 8]], np.float32)
    spread = replace(spread, low=-sizes, high=sizes, length=sizes, mean=0 * sizes)
    for granularity, expected in (("tensor", 8.0), ("head", [2.0, 8.0]), ("channel", sizes)):
        scheme = CacheScheme("int8", granularity)  # type: ignore[arg-type]
        found = choose_cache_range(spread, scheme, False)
        np.testing.assert_allclose(found.scale * 127, expected, rtol=1e-6)


def test_channels_that_are_never_active_get_a_usable_scale() -> None:
    for scheme in SCHEMES:
        found = choose_cache_range(statistics(0.0, 0.0, True), scheme, True)
        np.testing.assert_allclose(found.scale * MAXIMUM[scheme.format], 1.0)


def test_both_graphs_have_one_cache(tiny: Bundle, tmp_path: Path) -> None:
    data = check_sequences([np.arange(40)], tiny, "test")
    plan = QuantizationPlan(
        GraphPlan(replace(load_recipe("int8-wo"), kv_cache=SCHEMES[0])), GraphPlan(load_recipe("int8-wo"))
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
    ranges = fine_ranges(tiny, SCHEMES[0], 0.0)
    with pytest.raises(ValueError, match=r"present\.0\.key' is not written by one TensorScatter"):
        quantize_cache(model, tiny.contract, SCHEMES[0], ranges)
