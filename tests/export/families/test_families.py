"""Every family against its reference: in eager torch, on ONNX Runtime, for a CPU, and built in TensorRT-RTX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from family_cases import experts
from family_cases.case import LENGTH, TRAINED, WINDOW
from family_cases.cases import CASES, EXPORTED
from family_cases.features import features_of
from family_cases.references import SOURCE_LENGTHS, Answer, Reference, source_ids

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.torch_encoder_session import open_torch_session
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.family import FAMILIES
from kvgraph.runtime.encoder_session import has_encoder
from kvgraph.runtime.session import Cache, Floats, Session

# float32 sums in another order, on logits of up to 12.
TOLERANCE = 1e-4
# float16 keeps 11 bits of every product's result.
FLOAT16_TOLERANCE = 0.15
# Of the positions, where there are experts: between two that score alike, float16 chooses another than float32.
SAME_EXPERTS = 0.95
# Of means over 24 000 logits; norms and softmax round at other places.
HALF_PRECISION_MARGIN = 1.25
# Prompts in chunks, then one token at a time.
MIXED = [9, 7, 30] + [1] * (LENGTH - 46)
SPLITS = {
    "prefill alone": [LENGTH],
    "decode alone": [1] * LENGTH,
    "short prompt": [3] + [1] * (LENGTH - 3),
    "prompt longer than window and trained length": [17] + [1] * (LENGTH - 17),
    "four chunks": [16, 16, 16, 16],
    "uneven chunks, then decode": MIXED,
}
# Those that transformers has; its experts take other sizes in half precision.
IN_HALF_PRECISION = [
    name for name in CASES if not CASES[name].is_textbook and name not in experts.CHECKPOINTS
]
# Longer than a window, shorter, and on both sides of the length that ropes were trained at.
ROW_LENGTHS, DECODED = [1, WINDOW, TRAINED - 1, 40], 6


@dataclass
class Comparison:
    """What compares a session with a case's reference, and records the largest errors."""

    right: Reference
    new_cache: Callable[[Session], Cache]
    teacher_forced: Callable[..., Floats]
    ragged: Callable[..., Floats]
    record: Callable[..., None]

    def answer(self, session: Session, sizes: Sequence[int]) -> Answer:
        """What is right for all rows; only a rope that depends on the length asks in which steps."""
        return self.right.answer(whole_prompt(sizes) if session.contract.takes_new_length else [LENGTH])

    def steps(self, session: Session, sizes: Sequence[int]) -> None:
        """Every row, fed in chunks of `sizes`."""
        cache, answer = self.new_cache(session), self.answer(session, sizes)
        logits = self.teacher_forced(session, self.right.ids, sizes, cache)
        self.record(float32=largest_error(logits, answer.logits))
        np.testing.assert_allclose(logits, answer.logits, atol=TOLERANCE, rtol=0)
        names = {tensor.name for tensor in session.contract.state}
        found = {name: cache.read(name) for name in names}
        if has_encoder(session):
            encoded = session.encode(source_ids(self.right.case), SOURCE_LENGTHS)
            found |= {name: encoded.read(name) for name in answer.states.keys() - names}
        assert found.keys() == answer.states.keys()
        errors = []
        for name, rows in found.items():
            for row, expected in zip(rows, answer.states[name], strict=True):
                # Falcon's keys are kept once for each head in transformers.
                part = np.repeat(row[:, : expected.shape[1]], len(expected) // len(row), axis=0)
                errors.append(largest_error(part, expected))
                np.testing.assert_allclose(part, expected, atol=TOLERANCE, rtol=0)
        self.record(cache=max(errors))

    def unequal_rows(self, session: Session) -> None:
        """Rows of unequal length, prefilled together and decoded, equal runs of their own."""
        found = self.ragged(session, self.right.ids, ROW_LENGTHS, DECODED, self.new_cache(session))
        for row, length in enumerate(ROW_LENGTHS):
            alone = self.right.answer().logits[row, : length + DECODED]
            if session.contract.takes_new_length:
                alone = self.right.answer([length] + [1] * DECODED, slice(row, row + 1)).logits[0]
            np.testing.assert_allclose(found[row], alone[length - 1 :], atol=TOLERANCE, rtol=0)


def whole_prompt(sizes: Sequence[int]) -> list[int]:
    """The same steps with the chunks of the prompt as one: what longrope's choice of a table depends on."""
    decoded = len(sizes) - max((index + 1 for index, size in enumerate(sizes) if size > 1), default=1)
    return [sum(sizes) - decoded] + [1] * decoded


def largest_error(found: Floats, expected: Floats) -> float:
    return float(np.abs(found - expected).max())


@pytest.fixture
def compare(
    right: Reference,
    new_cache: Callable[[Session], Cache],
    teacher_forced: Callable[..., Floats],
    ragged: Callable[..., Floats],
    record: Callable[..., None],
) -> Comparison:
    return Comparison(right, new_cache, teacher_forced, ragged, record)


def test_every_family_is_exported_here() -> None:
    assert {CASES[name].family for name in EXPORTED} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_eager_torch_equals_the_reference(
    checkpoint: Path, open_torch: Callable[[Path], Session], compare: Comparison
) -> None:
    compare.record(features=features_of(open_checkpoint(checkpoint).config))
    compare.steps(open_torch(checkpoint), MIXED)
    compare.unequal_rows(open_torch(checkpoint))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", EXPORTED)
def test_every_split_equals_the_reference(
    bundle: Bundle, split: str, open_canonical: Callable[[Path], Session], compare: Comparison
) -> None:
    compare.steps(open_canonical(bundle.path), SPLITS[split])


@pytest.mark.parametrize("name", EXPORTED)
def test_rows_of_unequal_length_equal_runs_of_their_own(
    bundle: Bundle, open_canonical: Callable[[Path], Session], compare: Comparison
) -> None:
    compare.unequal_rows(open_canonical(bundle.path))


@pytest.mark.parametrize("name", EXPORTED)
def test_cpu_target_equals_the_reference(
    bundle: Bundle, kernels: Callable[[Bundle], Session], compare: Comparison
) -> None:
    compare.steps(kernels(bundle), MIXED)
    compare.unequal_rows(kernels(bundle))


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"), [("float16", "float16"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize("name", IN_HALF_PRECISION)
def test_half_precision_errs_no_more_than_that_of_transformers(
    checkpoint: Path, dtype: str, residual_dtype: str, compare: Comparison
) -> None:
    exact = compare.right.answer().logits
    session = open_torch_session(open_checkpoint(checkpoint), dtype, residual_dtype)
    found = compare.teacher_forced(session, compare.right.ids, [LENGTH], compare.new_cache(session))
    theirs_off = np.abs(compare.right.half_precision(dtype) - exact).mean()
    assert 0 < np.abs(found - exact).mean() < HALF_PRECISION_MARGIN * theirs_off


@pytest.mark.parametrize("name", EXPORTED)
def test_graphs_hold_standard_operators_of_opset_24(bundle: Bundle) -> None:
    encoder = () if bundle.contract.encoder is None else ("encode",)
    assert bundle.contract.graphs == (*encoder, "prefill", "decode")
    for graph in bundle.contract.graphs:
        path = bundle.graph_path(graph)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert {(opset.domain, opset.version) for opset in model.opset_import} == {("", 24)}
        assert {node.domain for node in model.graph.node} == {""}
        # Nor any whose output has a shape that depends on values.
        assert not {"If", "Loop", "NonZero", "Compress"} & {node.op_type for node in model.graph.node}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_float16_graphs_stay_near_float32_and_build_in_tensorrt_rtx(
    name: str,
    checkpoint: Path,
    exported: Callable[..., Bundle],
    open_canonical: Callable[[Path], Session],
    compare: Comparison,
) -> None:
    bundle, sizes = exported(checkpoint, dtype="float16"), [20] + [1] * (LENGTH - 20)
    session = open_canonical(bundle.path)
    found = compare.teacher_forced(session, compare.right.ids, sizes, compare.new_cache(session))
    expected = compare.answer(session, sizes).logits
    share = SAME_EXPERTS if name in experts.CHECKPOINTS else 1.0
    error = float(np.quantile(np.abs(found - expected).max(axis=-1), share))
    compare.record(float16=error)
    assert error < FLOAT16_TOLERANCE
    options = TensorRTOptions(max_batch=2, max_context=LENGTH, compute_capabilities=(89,))
    target = build_tensorrt(bundle, "tensorrt-rtx", options)
    assert target.compute_capabilities == (89,)
    assert set(target.graphs) == set(bundle.contract.graphs)
    compare.record(tensorrt=["builds"])
