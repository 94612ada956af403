"""Quantized bundles in kvgraph's CPU kernels against their own canonical graphs.

Weights and the rounding of inputs are the same on both sides: where a recipe quantizes weights alone, ONNX Runtime's
kernels round the input to 8 bits in blocks of 32, as ours do. One rounding that falls to the other side moves the
logits by much more than float32 does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.ort_cpu import Kernels, build_ort_cpu
from kvgraph.quant.plan import parse_plan
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.runtime.generate import generate
from kvgraph.runtime.generation import GenerationParams
from kvgraph.runtime.kernels import instruction_set, library_path
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Floats, Session
from kvgraph.runtime.threads import Threads

pytestmark = pytest.mark.skipif(
    library_path() is None, reason="kvgraph's CPU kernels are not compiled in this installation"
)

# Logits reach 5; the rounding of inputs in blocks moves them by up to 0.16.
TOLERANCE = 0.05
# A quantized head is no product that ONNX Runtime fuses: there, its input is not rounded. Nor are those of experts.
HEAD_TOLERANCE = 0.15
# Recipe -> what `input` says in the graph.
RECIPES = {
    "int8-dynamic": "token",
    "int8-sq": "static",
    "int8-wo": "block",
    "int4-wo": "block",
    "uint4-wo": "block",
}
# Recipes beside which the kernels have no form for some or all weights.
OTHERS = ("fp8-wo", "fp8", "nvfp4-wo", "mxfp4-wo")


def logits(session: Session, vocabulary: int) -> Floats:
    """Of two rows of unequal length, after two chunks and five steps."""
    ids = np.random.default_rng(2).integers(0, vocabulary, (2, 20))
    cache, lengths = session.allocate_cache(2, 24), np.array([9, 6])
    parts = [session.prefill(cache, ids[:, :9], np.zeros(2, np.int64), lengths[:, None] - 1, lengths).copy()]
    rows = np.tile(np.arange(3), (2, 1))
    parts.append(session.prefill(cache, ids[:, 9:12], lengths, rows, np.full(2, 3)).copy())
    for step in range(5):
        parts.append(session.decode(cache, ids[:, 12 + step : 13 + step], lengths + 3 + step).copy())
    return np.concatenate(parts, axis=1)


def attributes(graph: Path, operator: str, name: str) -> Counter[str]:
    return Counter(
        attribute.s.decode()
        for node in onnx.load(graph, load_external_data=False).graph.node
        for attribute in node.attribute
        if node.op_type == operator and attribute.name == name
    )


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("base", ["tiny", "tied"])
def test_a_recipe_is_computed_as_it_says(
    base: str, recipe: str, request: pytest.FixtureRequest, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    bundle = quantized(request.getfixturevalue(base), recipe)
    target = build_ort_cpu(bundle)
    inputs = attributes(target.graph_path("prefill"), "PackedLinear", "input")
    # The head stays float.
    assert inputs == {RECIPES[recipe]: 4 * 2, "float": 1}
    found = logits(open_session(bundle, "ort-cpu", threads=1), bundle.contract.vocab_size)
    expected = logits(OrtSession(bundle, threads=1), bundle.contract.vocab_size)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


def in_both_forms(bundle: Bundle, operator: str) -> list[Counter[str]]:
    """How an operator's nodes round their input in a target of each form; the logits of both agree."""
    found, inputs = [], []
    for form in get_args(Kernels):
        target = build_ort_cpu(bundle, form)
        found.append(logits(open_session(bundle, "ort-cpu", threads=1), bundle.contract.vocab_size))
        inputs.append(attributes(target.graph_path("prefill"), operator, "input"))
    np.testing.assert_allclose(found[0], found[1], atol=TOLERANCE)
    return inputs


@pytest.mark.parametrize("recipe", OTHERS)
def test_what_has_no_packed_form_runs_as_before(
    recipe: str, tied: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    # The head stays float.
    assert in_both_forms(quantized(tied, recipe), "PackedLinear") == [{"float": 1}, {}]


def test_prefill_and_decode_of_two_recipes_have_a_graph_each(
    tied: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    bundle = quantized(tied, "prefill=int8-dynamic,decode=int4-wo")
    lines: list[str] = []
    target = build_ort_cpu(bundle, report=lines.append)
    assert sorted(target.files) == ["decode.onnx", "prefill.onnx", "weights.safetensors"]
    assert attributes(target.graph_path("prefill"), "PackedLinear", "format")["int8"] == 8
    assert attributes(target.graph_path("decode"), "PackedLinear", "format")["int4"] == 8
    assert lines[0].startswith("weights 0.0 MB: prefill 0.0 MB, decode 0.0 MB")
    found = logits(open_session(bundle, "ort-cpu", threads=1), bundle.contract.vocab_size)
    np.testing.assert_allclose(
        found, logits(OrtSession(bundle, threads=1), bundle.contract.vocab_size), atol=TOLERANCE
    )


@pytest.mark.parametrize("spin", [True, False])
@pytest.mark.parametrize("recipe", ["int4-wo", "prefill=int8-dynamic,decode=int4-wo"])
def test_sessions_that_take_turns_stop_spinning_after_a_call(
    recipe: str, spin: bool, tied: Bundle, quantized: Callable[[Bundle, str], Bundle]
) -> None:
    bundle = quantized(tied, recipe)
    build_ort_cpu(bundle)
    session = open_session(bundle, "ort-cpu", threads=Threads(2, spin))
    assert isinstance(session, OrtSession)
    for graph in ("prefill", "decode"):
        options = session._sessions[graph].get_session_options()
        assert options.intra_op_num_threads == 2
        assert entry(options, "session.intra_op.allow_spinning") == (None if spin else "0")
        stops = spin and recipe.startswith("prefill=")
        assert entry(options, "session.force_spinning_stop") == ("1" if stops else None)
    alone = open_session(bundle, "ort-cpu", threads=1)
    found, expected = (logits(one, bundle.contract.vocab_size) for one in (session, alone))
    np.testing.assert_allclose(found, expected, atol=1e-5)  # threads share columns, and sum each alone


def entry(options: Any, name: str) -> str | None:
    """An entry of a session's options; to ask for one that was not set is an error."""
    try:
        return str(options.get_session_config_entry(name))
    except RuntimeError:
        return None


@pytest.mark.parametrize("recipe", ["int8-wo", "int4-wo", "uint4-wo"])
def test_experts_are_computed_as_the_canonical_graphs_do(
    recipe: str,
    exported: Callable[..., Bundle],
    tiny_checkpoint: Callable[..., Path],
    quantized: Callable[[Bundle, str], Bundle],
) -> None:
    mixtral = tiny_checkpoint("mixtral", num_hidden_layers=1, num_local_experts=5, num_experts_per_tok=2)
    bundle = quantized(exported(mixtral), recipe)
    target = build_ort_cpu(bundle)
    assert sorted(target.files) == ["prefill.onnx", "weights.safetensors"]
    graph = target.graph_path("prefill")
    for name in ("format", "down_format"):
        assert attributes(graph, "PackedExperts", name) == {recipe.removesuffix("-wo"): 1}
    found = logits(open_session(bundle, "ort-cpu", threads=1), bundle.contract.vocab_size)
    expected = logits(OrtSession(bundle, threads=1), bundle.contract.vocab_size)
    np.testing.assert_allclose(found, expected, atol=HEAD_TOLERANCE)


def test_experts_without_a_packed_form_run_as_before(
    exported: Callable[..., Bundle],
    tiny_checkpoint: Callable[..., Path],
    quantized: Callable[[Bundle, str], Bundle],
) -> None:
    mixtral = tiny_checkpoint("mixtral", num_hidden_layers=1, num_local_experts=5, num_experts_per_tok=2)
    assert in_both_forms(quantized(exported(mixtral), "fp8-wo"), "PackedExperts") == [{}, {}]


MIXED = """
name = "mixed"
embedding = "linear"
[linear.weight]
format = "int4"
block_size = 32
[[override]]
pattern = "*.k_proj"
weight = { format = "int8" }
[[override]]
pattern = "*.up_proj"
keep = true
[[override]]
pattern = "*.down_proj"
weight = { format = "int4", block_size = 16 }
[[override]]
pattern = "*.o_proj"
weight = { format = "int8", block_size = 64 }
"""


def test_weights_of_several_formats(tied: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED)
    bundle = quantize_bundle(tied, parse_plan(str(tmp_path / "mixed.toml")), tmp_path / "bundle")
    target = build_ort_cpu(bundle)
    graph = target.graph_path("prefill")
    # q, v, gate and the tied table in 4 bits, k in 8 by channel, o in 8 by block, up in floats; blocks of 16 stay.
    formats = attributes(graph, "PackedLinear", "format")
    assert formats == {"int4": 3 * 2 + 1, "int8": 2, "int8-block": 2, "float32": 2}
    assert attributes(graph, "PackedLinear", "gate") == {"": 13}
    assert attributes(graph, "PackedGather", "format") == {"int4": 1}
    found = logits(open_session(bundle, "ort-cpu", threads=1), bundle.contract.vocab_size)
    np.testing.assert_allclose(
        found, logits(OrtSession(bundle, threads=1), bundle.contract.vocab_size), atol=HEAD_TOLERANCE
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_of_16_bits(
    dtype: str,
    exported: Callable[..., Bundle],
    tiny_llama: Callable[..., Path],
    quantized: Callable[[Bundle, str], Bundle],
) -> None:
    wide = quantized(exported(tiny_llama()), "int4-wo")
    half = quantized(exported(tiny_llama(), dtype=dtype), "int4-wo")
    found = []
    for bundle in (wide, half):
        build_ort_cpu(bundle)
        found.append(logits(open_session(bundle, "ort-cpu", threads=1), bundle.contract.vocab_size))
    scales = attributes(half.target_path("ort-cpu") / "prefill.onnx", "PackedLinear", "scale_format")
    # bfloat16 scales of these weights are float16 numbers, too.
    assert set(scales) == {"float16", ""}
    # The weights were rounded to 16 bits first.
    np.testing.assert_allclose(found[0], found[1], atol=1.0)
    assert not np.array_equal(found[0], found[1])


def test_the_tiny_model_tells_the_same_story(repository: Path, exported: Callable[..., Bundle]) -> None:
    bundle = exported(repository / "tests" / "tiny_model" / "model")
    build_ort_cpu(bundle)
    prompts = [[1, 45, 230, 17], [1, 300, 8]]
    sessions = [open_session(bundle, "ort-cpu", threads=1), open_session(bundle, threads=1)]
    stories = [
        [one.token_ids for one in generate(session, prompts, GenerationParams(max_new_tokens=40))]
        for session in sessions
    ]
    assert stories[0] == stories[1]
    assert [session.info.kernels for session in sessions] == [instruction_set(), None]
