"""Mixtures of experts: what configs and tensors are taken to mean, and the parts against formulas in NumPy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.config import ModelConfig
from kvgraph.models.experts import Experts, ExpertsMLP, Router
from kvgraph.models.family import family
from kvgraph.models.layers import GatedMLP, Precision
from kvgraph.models.sources import plan_weights

FLOAT32 = Precision(torch.float32, torch.float32)
# float32 sums of a few dozen terms of about one.
TOLERANCE = 1e-5
FLOAT32 = Precision(torch.float32, torch.float32)
FULL, SLIDING = "full_attention", "sliding_attention"

COMMON = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "rope_theta": 1000000.0,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
QWEN = {
    "num_experts": 7,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
    "max_window_layers": 5,
}
# The keys of published files, at smaller sizes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral": {**COMMON, "num_local_experts": 7, "sliding_window": None},
    "qwen3_moe": {**COMMON, **QWEN, "head_dim": 8, "mlp_only_layers": [], "sliding_window": None},
    "qwen2_moe": {**COMMON, **QWEN, "shared_expert_intermediate_size": 20, "sliding_window": 32768},
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral", {"num_local_experts": ...}, "num_local_experts or num_experts is missing"),
    ("mixtral", {"num_experts_per_tok": ...}, "num_experts_per_tok is missing"),
    ("mixtral", {"num_experts_per_tok": 8}, "num_experts_per_tok is 8, expected at most the 7 experts"),
    ("mixtral", {"num_experts": 6}, "num_local_experts is 7 but num_experts is 6"),
    ("mixtral", {"norm_topk_prob": True}, "norm_topk_prob=True may change"),
    ("mixtral", {"shared_expert_intermediate_size": 4}, "shared_expert_intermediate_size=4 may change"),
    ("qwen3_moe", {"norm_topk_prob": ...}, "norm_topk_prob is missing"),
    ("qwen3_moe", {"decoder_sparse_step": ...}, "decoder_sparse_step is missing"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected an integer of at least 1"),
    ("qwen3_moe", {"mlp_only_layers": [5]}, r"mlp_only_layers is \[5\], expected a list of layers below 5"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts is 0, expected an integer of at least 1"),
    (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 5},
        "use_sliding_window is true and max_window_layers is set: versions of transformers differ",
    ),
    ("qwen3_moe", {"shared_expert_intermediate_size": 4}, "shared_expert_intermediate_size=4 may change"),
    ("qwen2_moe", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size is missing"),
    ("qwen2_moe", {"use_sliding_window": True}, "layer_types is missing: versions of transformers differ"),
    ("qwen2_moe", {"layer_types": [SLIDING] * 5}, "no sliding_window is in use"),
    ("qwen2_moe", {"n_group": 2}, "n_group=2 may change"),
]


def published(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json with some keys changed; a value of ... leaves one out."""
    config = {"model_type": model_type, **PUBLISHED[model_type], **changes}
    return copy.deepcopy({key: value for key, value in config.items() if value is not ...})


def read(hf: dict[str, Any]) -> Any:
    """What the family makes of a config.json: a class of its own, beyond `ModelConfig`."""
    return ModelConfig.from_hf(hf)


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_files_mean_what_transformers_takes_them_for(model_type: str) -> None:
    config, theirs = read(published(model_type)), AutoConfig.for_model(**published(model_type))
    for key, value in config.to_json().items():
        if key not in ("rope", "eos_token_ids", "dtype", "head_dim", "sliding_window"):
            assert value == getattr(theirs, key), key
    # Zero stands for none in one of them.
    assert config.sliding_window == (theirs.sliding_window or None)


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("model_type", PUBLISHED)
def test_whatever_transformers_writes_says_the_same(model_type: str, complete: bool) -> None:
    theirs = AutoConfig.for_model(**published(model_type))
    assert read(json.loads(theirs.to_json_string(use_diff=not complete))) == read(published(model_type))


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(published(model_type, **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [3]),
        ({"mlp_only_layers": [0, 4]}, [1, 2, 3]),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_experts_are_in_the_layers_that_the_config_says(
    model_type: str, changes: dict[str, Any], expected: list[int]
) -> None:
    config = read(published(model_type, **changes))
    with torch.device("meta"):
        decoder = family(model_type).build(config, FLOAT32)
    found = [i for i in range(5) if f"model.layers.{i}.mlp.experts.up_proj.weight" in decoder.weights()]
    assert found == expected
    plan = plan_weights(family(model_type), decoder)
    assert plan.sources.keys() == decoder.weights().keys()
    stored = {name for name in plan.shapes if ".experts.6.down_proj." in name}
    assert stored == {f"model.layers.{i}.mlp.experts.6.down_proj.weight" for i in expected}


@pytest.mark.parametrize(
    ("add", "remove", "message"),
    [
        ([], "block_sparse_moe.experts.2.w3.weight", r"missing.*experts\.2\.w3"),
        (["block_sparse_moe.experts.3.w1.weight"], "", r"not expected.*experts\.3\.w1"),
        (["mlp.up_proj.weight"], "", r"not expected.*mlp\.up_proj"),
    ],
)
def test_an_expert_too_few_or_too_many_is_refused(
    add: list[str], remove: str, message: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    source = tiny_checkpoint("mixtral", num_local_experts=3, rope_parameters=rope)
    tensors = load_file(source / "model.safetensors")
    tensors.pop(f"model.layers.1.{remove}", None)
    tensors.update({f"model.layers.1.{name}": torch.ones(44, 20) for name in add})
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(tmp_path)
    with torch.device("meta"):
        decoder = family("mixtral").build(checkpoint.config, FLOAT32)
    plan = plan_weights(family("mixtral"), decoder)
    with pytest.raises(ValueError, match=message):
        checkpoint.weights().check(plan.shapes, plan.ignorable)


def random_weights(module: torch.nn.Module) -> dict[str, Any]:
    """Set every parameter at random; what was set, in float64."""
    torch.manual_seed(3)
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter) / 2
    return {name: parameter.detach().double().numpy() for name, parameter in module.named_parameters()}


def softmax(scores: Any) -> Any:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def gated(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """SwiGLU."""
    return (x @ gate / (1 + np.exp(-(x @ gate))) * (x @ up)) @ down


@torch.no_grad()
def test_raw_weights_are_the_softmax_over_all_experts() -> None:
    router = Router(6, 9, top_k=3, normalized=False)
    weight, x = random_weights(router)["weight"], torch.randn(20, 6)
    weights, chosen = router(x)
    expected = softmax(x.double().numpy() @ weight)
    np.testing.assert_array_equal(chosen, np.argsort(-expected, -1)[:, :3])
    np.testing.assert_allclose(weights, -np.sort(-expected, -1)[:, :3], atol=TOLERANCE)


@torch.no_grad()
def test_normalized_weights_are_those_of_either_order_of_softmax_and_top_k() -> None:
    router = Router(6, 9, top_k=3, normalized=True)
    weight, x = random_weights(router)["weight"], torch.randn(20, 6)
    weights, chosen = router(x)
    scores = x.double().numpy() @ weight
    highest = -np.sort(-softmax(scores), -1)[:, :3]
    np.testing.assert_array_equal(chosen, np.argsort(-scores, -1)[:, :3])
    np.testing.assert_allclose(weights, highest / highest.sum(-1, keepdims=True), atol=TOLERANCE)
    np.testing.assert_allclose(weights, softmax(-np.sort(-scores, -1)[:, :3]), atol=TOLERANCE)


# Choices of two of five experts: at random, all alike, all alike but one, and more blocks than tokens.
CHOICES = {
    "random": np.random.default_rng(1).permuted(np.tile(np.arange(5), (23, 1)), axis=1)[:, :2],
    "all the same": np.tile([4, 1], (23, 1)),
    "one apart": np.concatenate([np.tile([0, 2], (22, 1)), [[3, 4]]]),
    "one token": np.array([[2, 0]]),
    "as many as experts": np.array([[4, 3], [3, 4], [4, 3]]),
}


@pytest.mark.parametrize("form", ["gathered", "everywhere", "grouped"])
@pytest.mark.parametrize("choice", CHOICES)
@torch.no_grad()
def test_every_form_adds_up_what_the_chosen_experts_give(form: str, choice: str) -> None:
    experts = Experts(5, 6, 7, "silu", FLOAT32)
    values, chosen = random_weights(experts), CHOICES[choice]
    x, weights = torch.randn(len(chosen), 6), torch.rand(len(chosen), 2)
    found = getattr(experts, form)(x, weights, torch.from_numpy(chosen))
    names = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    for row, token in enumerate(x.double().numpy()):
        expected = sum(
            weights[row, place].item() * gated(token, *(values[name][expert] for name in names))
            for place, expert in enumerate(chosen[row])
        )
        np.testing.assert_allclose(found[row], expected, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["gathered", "everywhere", "grouped"])
@torch.no_grad()
def test_what_overflows_in_an_expert_that_nobody_chose_is_not_seen(form: str) -> None:
    experts = Experts(5, 6, 7, "silu", FLOAT32)
    random_weights(experts)
    experts.down_proj.weight[2] = torch.inf
    chosen = torch.tensor([[0, 4], [1, 3], [4, 3]])
    assert getattr(experts, form)(torch.randn(3, 6), torch.rand(3, 2), chosen).isfinite().all()


@torch.no_grad()
def test_the_shared_expert_counts_by_the_sigmoid_of_its_score() -> None:
    plain = ExpertsMLP(Router(6, 5, 2, True), Experts(5, 6, 7, "silu", FLOAT32))
    shared = GatedMLP(6, 8, "silu", False, FLOAT32)
    both = ExpertsMLP(plain.gate, plain.experts, shared)
    values, x = random_weights(both), torch.randn(2, 3, 6)
    rows = x.double().numpy()
    own = gated(rows, *(values[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")))
    share = 1 / (1 + np.exp(-(rows @ values["shared_expert_gate.weight"])))
    np.testing.assert_allclose(both(x) - plain(x), own * share, atol=TOLERANCE)
