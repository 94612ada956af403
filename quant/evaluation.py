"""What quantization costs on a text: perplexity, KL divergence and top-1 agreement against the float bundle."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.bundle import Bundle
from kvgraph.export.targets.ort_cpu import widened_contract
from kvgraph.export.targets.ort_cpu_graph import lower_for_ort_cpu, needs_lowering
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.parity import allocate_for, plan_steps
from kvgraph.runtime.parity_metrics import log_softmax
from kvgraph.runtime.session import Floats, Ids, Session
from kvgraph.runtime.tokenizer import Tokenizer

# As `kvgraph perplexity` cuts a text, so that its figures are these.
DEFAULT_WINDOW = 512
# Logits of one call hold at most so many values (64 MB), and a call takes at most so many windows.
_CALL_VALUES = 1 << 24
_CALL_WINDOWS = 8
_LEAST_CHUNK = 16


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Two bundles over one text.

    Attributes:
        text: Name of the file.
        tokens: How many tokens were scored.
        windows: How many windows they were cut into.
        window: Most tokens of one.
        prefill: How many tokens of a window go through the prefill graph; the others through decode, one by one.
        runtime: What both ran on.
        reference_perplexity: Of the float bundle.
        perplexity: Of the quantized one.
        kl_mean: KL(float || quantized) of the next token's distribution, in nats, mean over all tokens.
        kl_max: The largest of one token.
        top1_agreement: Share of tokens for which both find the same one most likely.
    """

    text: str
    tokens: int
    windows: int
    window: int
    prefill: int
    runtime: str
    reference_perplexity: float
    perplexity: float
    kl_mean: float
    kl_max: float
    top1_agreement: float

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; a number that is not finite is null."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """A text in tokens.

    Attributes:
        name: Of its file.
        token_ids: The text without BOS.
        bos_token_id: What each window begins with; None: the first token of each is not scored.
    """

    name: str
    token_ids: Sequence[int]
    bos_token_id: int | None


def read_evaluation_text(path: Path, bundle: Bundle) -> EvaluationText:
    """A file of UTF-8 text in a bundle's tokens.

    Raises:
        FileNotFoundError: There is no such file, or the bundle has no tokenizer.
        ValueError: The text is not UTF-8, or empty.
    """
    try:
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error})") from error
    tokenizer = Tokenizer.load(bundle.path, bundle.config)
    token_ids = tokenizer.encode(content, add_special_tokens=False)
    if len(token_ids) < 2:
        raise ValueError(f"{path}: {len(token_ids)} tokens, too few to score one; give a longer text")
    return EvaluationText(path.name, token_ids, tokenizer.bos_token_id)


def evaluate_bundle(reference: Bundle, quantized: Bundle, text: EvaluationText) -> Evaluation:
    """Compare a quantized bundle with its float one on a text, as it is used.

    Where the two graphs have recipes of their own, the first half of every window goes through prefill, the rest
    through decode: each graph then counts as much as the other.
    """
    assert quantized.recipe is not None
    split = quantized.recipe["prefill"] != quantized.recipe["decode"]
    sessions = _open(reference), _open(quantized)
    limit = sessions[0].contract.capacity or sessions[0].contract.max_positions
    window = min(DEFAULT_WINDOW, limit)
    prefill = window // 2 if split else window
    return evaluate(*sessions, text, window, prefill)


def evaluate(
    reference: Session, candidate: Session, text: EvaluationText, window: int, prefill: int
) -> Evaluation:
    """Compare two sessions over consecutive windows of a text that know nothing of each other.

    Args:
        reference: What is right.
        candidate: What is judged.
        text: Two tokens or more.
        window: Tokens of a window.
        prefill: How many tokens of a window are prefilled.
    """
    prefix, ids = [] if text.bos_token_id is None else [text.bos_token_id], text.token_ids
    texts = [np.array([*prefix, *ids[at : at + window]]) for at in range(0, len(ids), window)]
    texts = [one for one in texts if len(one) > 1]
    batch = min(len(texts), _CALL_WINDOWS)
    scores = [
        scored
        for at in range(0, len(texts), batch)
        for scored in _score(reference, candidate, texts[at : at + batch], prefill)
    ]
    right, other, divergence, agreement = (np.concatenate(column) for column in zip(*scores, strict=True))
    info = candidate.info
    with np.errstate(over="ignore"):
        return Evaluation(
            text=text.name,
            tokens=len(right),
            windows=len(texts),
            window=window,
            prefill=prefill,
            runtime=f"{info.runtime} {info.version} on {info.device}",
            reference_perplexity=float(np.exp(-right.mean())),
            perplexity=float(np.exp(-other.mean())),
            kl_mean=float(divergence.mean()),
            kl_max=float(divergence.max()),
            top1_agreement=float(agreement.mean()),
        )


_Scores = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]


def _score(reference: Session, candidate: Session, texts: Sequence[Ids], prefill: int) -> Iterator[_Scores]:
    """Of every scored token, a call at a time: both log-likelihoods, the KL divergence, and whether the best agree."""
    vocab_size = reference.contract.vocab_size
    chunk = max(_LEAST_CHUNK, _CALL_VALUES // (len(texts) * vocab_size))
    steps = plan_steps([text[:-1] for text in texts], prefill, chunk)
    caches = allocate_for(steps, reference), allocate_for(steps, candidate)
    targets = np.zeros((len(texts), max(len(text) for text in texts)), np.int64)
    for row, text in enumerate(texts):
        targets[row, : len(text) - 1] = text[1:]
    for step in steps:
        logits = step.run(reference, caches[0]), step.run(candidate, caches[1])
        valid = step.is_valid
        positions = step.past_length[:, None] + np.arange(valid.shape[1])
        expected = np.take_along_axis(targets, np.minimum(positions, targets.shape[1] - 1), axis=1)[valid]
        yield _compare(logits[0][valid], logits[1][valid], expected)


def _compare(reference: Floats, candidate: Floats, targets: Ids) -> _Scores:
    """Scores of rows of logits [R, V]."""
    right, other = (log_softmax(logits.astype(np.float64)) for logits in (reference, candidate))
    rows = np.arange(len(targets))
    # Rounding can leave a KL of nothing slightly below zero.
    divergence = np.maximum((np.exp(right) * (right - other)).sum(axis=1), 0)
    return (
        right[rows, targets],
        other[rows, targets],
        divergence,
        right.argmax(axis=1) == other.argmax(axis=1),
    )


def _open(bundle: Bundle) -> Session:
    """A session on this machine's CPU, over graphs lowered in memory where the canonical ones do not run there."""
    if not needs_lowering(bundle):
        return open_session(bundle)
    return OrtSession(bundle, graphs=lower_for_ort_cpu(bundle), contract=widened_contract(bundle.contract))
