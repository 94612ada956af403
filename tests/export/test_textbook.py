"""The textbook decoders against their formulas in NumPy, in eager torch and on ONNX Runtime."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GRAPHS, past_key, past_value
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Ids, Session

# float32 against float64, on logits of up to 10.
TOLERANCE = 1e-4
LENGTH, VOCABULARY = 64, 97

Array = NDArray[np.float64]
Weights = dict[str, Array]


class Case(NamedTuple):
    """A tiny checkpoint, and whether it is also exported, which takes seconds."""

    config: dict[str, Any]
    exported: bool = False


SIZES = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": False,
}
PRE_NORM = {
    **SIZES,
    "model_type": "pre_norm_decoder",
    "hidden_size": 20,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    # Large, so that its place matters.
    "rms_norm_eps": 0.1,
    "eps_inside_root": True,
    "rope_theta": 1000.0,
    "rope_interleaved": False,
}
POST_NORM = {
    **SIZES,
    "model_type": "post_norm_decoder",
    "hidden_size": 30,
    "num_attention_heads": 3,
    "layer_norm_eps": 0.1,
    "positions": "sinusoidal",
    "scale_embeddings": True,
    "ffn": "plain",
    "hidden_act": "gelu",
}
ROTARY = {"positions": "rotary", "rope_theta": 1000.0, "rope_interleaved": True, "scale_embeddings": False}
CASES = {
    "pre-norm, two key/value heads": Case(PRE_NORM),
    "pre-norm, one key/value head, eps outside the root": Case(
        {**PRE_NORM, "num_key_value_heads": 1, "eps_inside_root": False}, exported=True
    ),
    "pre-norm, as many key/value heads as heads, interleaved, tied": Case(
        {**PRE_NORM, "num_key_value_heads": 6, "rope_interleaved": True, "tie_word_embeddings": True}
    ),
    "post-norm, sinusoidal, plain": Case(POST_NORM, exported=True),
    "post-norm, learned, tanh": Case(
        {**POST_NORM, "positions": "learned", "hidden_act": "gelu_pytorch_tanh", "head_bias": True}
    ),
    "post-norm, rotary, swiglu": Case(
        {
            **{key: value for key, value in POST_NORM.items() if key != "hidden_act"},
            **ROTARY,
            "ffn": "swiglu",
        },
        exported=True,
    ),
    "post-norm, rotary by halves, relu, tied, wide heads": Case(
        {
            **POST_NORM,
            **ROTARY,
            "rope_interleaved": False,
            "hidden_act": "relu",
            "tie_word_embeddings": True,
            "head_dim": 12,
        }
    ),
}
EXPORTED = [name for name, case in CASES.items() if case.exported]


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors that the two module docstrings document."""
    pre, size, inner = config["model_type"] == "pre_norm_decoder", config["hidden_size"], 44
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", size // heads)
    kv_size = config.get("num_key_value_heads", heads) * dim
    swiglu = config.get("ffn", "swiglu") == "swiglu"
    linears = {"attn.wq": (heads * dim, size), "attn.wk": (kv_size, size), "attn.wv": (kv_size, size)}
    linears |= {"attn.wo": (size, heads * dim), "ffn.w1": (inner, size)}
    linears |= {"ffn.w2": (inner, size), "ffn.w3": (size, inner)} if swiglu else {"ffn.w2": (size, inner)}
    norms = ("attn_norm", "ffn_norm") if pre else ("norm1", "norm2")
    result: dict[str, tuple[int, ...]] = {"embed.weight": (VOCABULARY, size)}
    for block in (f"blocks.{layer}." for layer in range(config["num_hidden_layers"])):
        for name, shape in {**linears, **dict.fromkeys(norms, (size,))}.items():
            result[f"{block}{name}.weight"] = shape
            if not pre and not (swiglu and name.startswith("ffn")):
                result[f"{block}{name}.bias"] = shape[:1]
    if pre:
        result["norm.weight"] = (size,)
    if config.get("positions") == "learned":
        result["positions.weight"] = (LENGTH, size)
    if not config["tie_word_embeddings"]:
        result["head.weight"] = (VOCABULARY, size)
    if config.get("head_bias"):
        result["head.bias"] = (VOCABULARY,)
    return result


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Weights]]:
    """A case's directory and its tensors."""

    @functools.cache
    def make(name: str) -> tuple[Path, Weights]:
        random, config = np.random.default_rng(11), CASES[name].config
        tensors = {
            tensor: (random.normal(0, 0.4, shape) + ("norm" in tensor)).astype(np.float32)
            for tensor, shape in shapes(config).items()
        }
        path = tmp_path_factory.mktemp(config["model_type"])
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config))
        return path, {tensor: array.astype(np.float64) for tensor, array in tensors.items()}

    return make


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def rms_norm(weights: Weights, name: str, x: Array, config: dict[str, Any]) -> Array:
    squares, eps = (x**2).mean(-1, keepdims=True), config["rms_norm_eps"]
    scale = np.sqrt(squares + eps) if config["eps_inside_root"] else np.sqrt(squares) + eps
    return x / scale * weights[f"{name}.weight"]


def layer_norm(weights: Weights, name: str, x: Array, config: dict[str, Any]) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rotate(x: Array, config: dict[str, Any]) -> Array:
    """[B, heads, S, D]: pairs as complex numbers, turned by position * theta ** (-2r / D)."""
    dim = x.shape[-1]
    frequencies = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    turn = np.exp(1j * np.arange(x.shape[2])[:, None] * frequencies)
    neighbours = slice(0, dim, 2), slice(1, dim, 2)
    halves = slice(0, dim // 2), slice(dim // 2, dim)
    first, second = neighbours if config["rope_interleaved"] else halves
    pairs, result = (x[..., first] + 1j * x[..., second]) * turn, np.empty_like(x)
    result[..., first], result[..., second] = pairs.real, pairs.imag
    return result


def attention(weights: Weights, block: str, x: Array, config: dict[str, Any]) -> tuple[Array, Array, Array]:
    """The block's attention, its keys and its values."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    query, key, value = (
        linear(weights, f"{block}.attn.w{name}", x).reshape(*x.shape[:2], count, -1).swapaxes(1, 2)
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    if "rope_theta" in config:
        query, key = rotate(query, config), rotate(key, config)
    result, later = np.empty_like(query), np.triu(np.full((x.shape[1], x.shape[1]), -np.inf), 1)
    for head in range(heads):
        read = head // (heads // kv_heads)
        scores = query[:, head] @ key[:, read].swapaxes(1, 2) / math.sqrt(query.shape[-1]) + later
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        result[:, head] = shares / shares.sum(-1, keepdims=True) @ value[:, read]
    joined = result.swapaxes(1, 2).reshape(*x.shape[:2], -1)
    return linear(weights, f"{block}.attn.wo", joined), key, value


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_pytorch_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}


def feed_forward(weights: Weights, block: str, x: Array, config: dict[str, Any]) -> Array:
    first = linear(weights, f"{block}.ffn.w1", x)
    if config.get("ffn", "swiglu") == "plain":
        return linear(weights, f"{block}.ffn.w2", ACTIVATIONS[config["hidden_act"]](first))
    silu = first / (1 + np.exp(-first))
    return linear(weights, f"{block}.ffn.w3", silu * linear(weights, f"{block}.ffn.w2", x))


def embedded(weights: Weights, ids: Ids, config: dict[str, Any]) -> Array:
    x, size = weights["embed.weight"][ids], config["hidden_size"]
    if config.get("scale_embeddings"):
        x = x * math.sqrt(size)
    if config.get("positions") == "learned":
        return x + weights["positions.weight"][: ids.shape[1]]
    if config.get("positions") == "sinusoidal":
        for position in range(ids.shape[1]):
            for i in range(size // 2):
                angle = position / 10000 ** (2 * i / size)
                x[:, position, 2 * i] += math.sin(angle)
                x[:, position, 2 * i + 1] += math.cos(angle)
    return x


def decode(weights: Weights, ids: Ids, config: dict[str, Any]) -> tuple[Array, list[tuple[Array, Array]]]:
    """Logits at every position of ids, and the keys and values of every layer."""
    x, cache = embedded(weights, ids, config), []
    pre = config["model_type"] == "pre_norm_decoder"
    for layer in range(config["num_hidden_layers"]):
        block = f"blocks.{layer}"
        if pre:
            attended, *kept = attention(
                weights, block, rms_norm(weights, f"{block}.attn_norm", x, config), config
            )
            x = x + attended
            x = x + feed_forward(weights, block, rms_norm(weights, f"{block}.ffn_norm", x, config), config)
        else:
            attended, *kept = attention(weights, block, x, config)
            x = layer_norm(weights, f"{block}.norm1", x + attended, config)
            x = layer_norm(weights, f"{block}.norm2", x + feed_forward(weights, block, x, config), config)
        cache.append((kept[0], kept[1]))
    if pre:
        x = rms_norm(weights, "norm", x, config)
    head = weights["embed.weight" if config["tie_word_embeddings"] else "head.weight"]
    return x @ head.T + weights.get("head.bias", 0.0), cache


@functools.cache
def torch_session(path: Path) -> TorchSession:
    return TorchSession.open(open_checkpoint(path))


@pytest.fixture
def session(
    name: str,
    runtime: str,
    make_checkpoint: Callable[[str], tuple[Path, Weights]],
    exported: Callable[..., Bundle],
    ort: Callable[..., OrtSession],
) -> Session:
    path, _ = make_checkpoint(name)
    return torch_session(path) if runtime == "torch" else ort(exported(path, dtype="float32"))


BOTH_RUNTIMES = [
    pytest.param(name, runtime, id=f"{name}-{runtime}")
    for name, case in CASES.items()
    for runtime in (("torch", "ort") if case.exported else ("torch",))
]


@pytest.mark.parametrize(
    "sizes",
    [[LENGTH], [1] * LENGTH, [17] + [1] * (LENGTH - 17), [9, 7, 30] + [1] * (LENGTH - 46)],
    ids=["prefill alone", "decode alone", "prefill, then decode", "chunks, then decode"],
)
@pytest.mark.parametrize(("name", "runtime"), BOTH_RUNTIMES)
def test_every_split_equals_the_formulas(
    name: str,
    session: Session,
    sizes: list[int],
    make_checkpoint: Callable[[str], tuple[Path, Weights]],
    random_ids: Callable[..., Ids],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids, cache = random_ids(2, LENGTH), session.allocate_cache(2)
    logits, kept = decode(make_checkpoint(name)[1], ids, CASES[name].config)
    np.testing.assert_allclose(teacher_forced(session, ids, sizes, cache), logits, atol=TOLERANCE, rtol=0)
    for layer, (keys, values) in enumerate(kept):
        for cached, array in ((past_key(layer), keys), (past_value(layer), values)):
            found = cache.read(cached)[:, :, :LENGTH]
            np.testing.assert_allclose(found, array, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("name", "runtime"), BOTH_RUNTIMES)
def test_rows_of_unequal_length_equal_runs_of_their_own(
    name: str,
    session: Session,
    make_checkpoint: Callable[[str], tuple[Path, Weights]],
    random_ids: Callable[..., Ids],
    ragged: Callable[..., Floats],
) -> None:
    lengths, ids = [1, 9, 3, 40], random_ids(4, LENGTH)
    found = ragged(session, ids, lengths, 6)
    for row, length in enumerate(lengths):
        alone, _ = decode(make_checkpoint(name)[1], ids[row : row + 1, : length + 6], CASES[name].config)
        np.testing.assert_allclose(found[row], alone[0, length - 1 :], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", EXPORTED)
def test_graphs_hold_standard_operators_of_opset_24(
    name: str, make_checkpoint: Callable[[str], tuple[Path, Weights]], exported: Callable[..., Bundle]
) -> None:
    for graph in GRAPHS:
        path = exported(make_checkpoint(name)[0], dtype="float32").graph_path(graph)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 24)}
        assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_float16_graphs_build_in_tensorrt_rtx(
    name: str, make_checkpoint: Callable[[str], tuple[Path, Weights]], exported: Callable[..., Bundle]
) -> None:
    options = TensorRTOptions(max_batch=2, max_context=LENGTH, compute_capabilities=(89,))
    target = build_tensorrt(exported(make_checkpoint(name)[0], dtype="float16"), "tensorrt-rtx", options)
    assert target.compute_capabilities == (89,)
