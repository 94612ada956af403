"""Factors that pass from one weight to another: whatever they are, the model computes what it did."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.weights_file import WEIGHTS_FILE
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.formats import Floats
from kvgraph.quant.layer_graph import LayeredGraph
from kvgraph.quant.plan import Rescaling
from kvgraph.quant.rescaling import Fold, add_rescaling, find_folds, rescale_all
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Ids

# Factors of up to 20 and their inverses, in float32.
TOLERANCE = 2e-3

DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
NORM, SECOND_NORM = "input_layernorm", "post_attention_layernorm"
ATTENTION = {QKV: NORM, ("o_proj",): "v_proj"}
GATED = {GATE_UP: SECOND_NORM, ("down_proj",): "up_proj"}
# Family -> changes to its config, and what each group of products hands its factors to.
FAMILIES: dict[str, tuple[dict[str, Any], dict[tuple[str, ...], str]]] = {
    "llama": ({}, {**ATTENTION, **GATED}),
    "llama with biases": ({"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, {**ATTENTION, **GATED}),
    # One norm with a bias feeds attention and MLP; behind GELU nothing can be handed on.
    "phi": (
        {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}},
        {(*QKV, "up_proj"): NORM, ("o_proj",): "v_proj"},
    ),
    # ReLU lets a factor through.
    "starcoder2": (
        {"rope_parameters": DEFAULT, "hidden_act": "relu"},
        {**ATTENTION, ("up_proj",): SECOND_NORM, ("down_proj",): "up_proj"},
    ),
    # Norms behind the products: the residual stream is their input.
    "olmo2": ({"rope_parameters": DEFAULT}, {("o_proj",): "v_proj", ("down_proj",): "up_proj"}),
    # Soft caps are written out, so that attention is no one operator.
    "gemma2": (
        {"rope_parameters": DEFAULT, "tie_word_embeddings": True, "query_pre_attn_scalar": 7, "hidden_size": 24,
         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 9.0, "sliding_window": 5},
        {QKV: NORM, GATE_UP: "pre_feedforward_layernorm", ("down_proj",): "up_proj"},
    ),
}  # fmt: skip


def layered(bundle: Bundle) -> LayeredGraph:
    model = ir.load(bundle.graph_path("prefill"))
    return LayeredGraph(model, bundle.weights.keys(), bundle.contract.num_layers)


def short(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def described(folds: list[Fold]) -> dict[tuple[str, ...], str]:
    return {
        tuple(short(product.module) for product in fold.products): short(fold.producers[0]) for fold in folds
    }


def random_rescalings(bundle: Bundle) -> dict[str, Rescaling]:
    """Every fold of a bundle with factors of its own."""
    random, graph = np.random.default_rng(4), layered(bundle)
    rescalings: dict[str, Rescaling] = {}
    with BundleWeights(bundle) as weights:
        for index in range(bundle.contract.num_layers + 1):
            piece = graph.head(with_logits=True) if index == graph.num_layers else graph.layer(index)
            for fold in find_folds(piece):
                channels = weights.shape(fold.producers[0])[-1]
                factors = np.exp(random.uniform(-3, 3, channels)).astype(np.float32)
                add_rescaling(rescalings, fold, factors)
    return rescalings


def rescaled(bundle: Bundle, rescalings: Mapping[str, Rescaling], folder: Path) -> Bundle:
    """A float32 bundle with other weights in the same places."""
    path = folder / "rescaled"
    shutil.copytree(bundle.path, path)
    with BundleWeights(bundle) as weights, (path / WEIGHTS_FILE).open("r+b") as file:
        for name in rescalings:
            values = rescale_all({name: np.asarray(weights.read(name), np.float32)}, rescalings)[name]
            file.seek(weights.tensors[name].offset)
            file.write(np.ascontiguousarray(values).tobytes())
    return Bundle.open(path)


def all_logits(bundle: Bundle, ids: Ids) -> Floats:
    session = OrtSession(bundle, threads=1)
    rows, length = ids.shape
    cache = session.allocate_cache(rows, length + 1)
    positions = np.tile(np.arange(length), (rows, 1))
    prefilled = session.prefill(cache, ids, np.zeros(rows, np.int64), positions).copy()
    decoded = session.decode(cache, ids[:, :1], np.full(rows, length)).copy()
    return np.concatenate([prefilled, decoded], axis=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_any_factors_leave_the_function(
    tiny_checkpoint: Callable[..., Path],
    exported: Callable[..., Bundle],
    tmp_path: Path,
    name: str,
) -> None:
    changes, expected = FAMILIES[name]
    bundle = exported(tiny_checkpoint(name.split()[0], **changes), dtype="float32")
    assert described(find_folds(layered(bundle).layer(1))) == expected
    rescalings = random_rescalings(bundle)
    changed = rescaled(bundle, rescalings, tmp_path)
    ids = np.random.default_rng(0).integers(0, 97, (2, 20))
    logits = all_logits(bundle, ids)
    np.testing.assert_allclose(all_logits(changed, ids), logits, atol=TOLERANCE * float(np.abs(logits).max()))
    # Something did change.
    with BundleWeights(bundle) as before, BundleWeights(changed) as after:
        assert all(not np.array_equal(before.read(tensor), after.read(tensor)) for tensor in rescalings)


def test_an_untied_head_hands_its_factors_to_the_last_norm(tiny: Bundle, tied: Bundle) -> None:
    assert described(find_folds(layered(tiny).head(with_logits=True))) == {("lm_head",): "norm"}
    # The table is read by the embedding, too.
    assert find_folds(layered(tied).head(with_logits=True)) == []


def test_biases_take_part(tiny_checkpoint: Callable[..., Path], exported: Callable[..., Bundle]) -> None:
    bundle = exported(tiny_checkpoint("llama", attention_bias=True, mlp_bias=True), dtype="float32")
    producers = {fold.input: fold.producers for fold in find_folds(layered(bundle).layer(0))}
    assert ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias") in producers.values()
    assert (
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
    ) in producers.values()


def test_query_heads_of_a_group_share_factors(tiny: Bundle) -> None:
    fold = next(fold for fold in find_folds(layered(tiny).layer(0)) if fold.through_cache)
    assert fold.groups == (2, 2, 8)
    values = np.arange(32, dtype=np.float32)
    # Query head h reads key/value head h // 2.
    expected = [
        [max(values[16 * head + d], values[16 * head + 8 + d]) for d in range(8)] for head in range(2)
    ]
    np.testing.assert_array_equal(fold.reduce(values), np.ravel(expected))
    spread = fold.spread(np.arange(16, dtype=np.float32))
    np.testing.assert_array_equal(spread[0:8], spread[8:16])
    np.testing.assert_array_equal(spread[16:24], np.arange(8, 16))


def test_factors_of_one_tensor_multiply(tiny: Bundle) -> None:
    """up_proj gains what it takes from the norm and loses what it hands to down_proj."""
    folds = {short(fold.products[-1].module): fold for fold in find_folds(layered(tiny).layer(0))}
    rescalings: dict[str, Rescaling] = {}
    first, second = np.full(20, 2, np.float32), np.full(44, 4, np.float32)
    for fold, factors in ((folds["up_proj"], first), (folds["down_proj"], second), (folds["up_proj"], first)):
        add_rescaling(rescalings, fold, factors)
    up = rescalings["model.layers.0.mlp.up_proj.weight"]
    assert up.inputs is not None
    assert up.outputs is not None
    np.testing.assert_array_equal(up.inputs, np.full(20, 4))
    np.testing.assert_array_equal(up.outputs, np.full(44, 0.25))
    norm = rescalings["model.layers.0.post_attention_layernorm.weight"]
    assert norm.outputs is not None
    np.testing.assert_array_equal(norm.outputs, np.full(20, 0.25))


def test_products_of_rows_that_are_scaled_keep_their_inputs(
    exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]
) -> None:
    bundle = exported(tiny_llama(), dtype="float16", residual_dtype="float32")
    modules = {
        product.module.rpartition(".")[2]
        for fold in find_folds(layered(bundle).layer(0))
        for product in fold.products
    }
    assert modules == {*QKV, *GATE_UP}
