"""What a session of an encoder-decoder model does with sources, in eager torch and on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from family_cases import encoder_decoders
from family_cases.case import Case
from family_cases.references import SOURCE_LENGTHS, Reference, source_ids

from kvgraph.export.bundle import Bundle
from kvgraph.runtime.encoder_session import EncoderSession
from kvgraph.runtime.session import Cache, Floats

# float32 sums in another order, on logits of up to 12.
TOLERANCE = 1e-4
RUNTIMES = ("torch", "canonical")
EXPORTED = [case.name for case in encoder_decoders.CASES if case.exported]


@pytest.fixture
def session(
    runtime: str,
    checkpoint: Path,
    exported: Callable[..., Bundle],
    open_torch: Callable[[Path], EncoderSession],
    open_canonical: Callable[[Path], EncoderSession],
) -> EncoderSession:
    if runtime == "torch":
        return open_torch(checkpoint)
    return open_canonical(exported(checkpoint, dtype="float32").path)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", EXPORTED)
def test_rows_may_share_a_source(
    case: Case,
    session: EncoderSession,
    right: Reference,
    new_cache: Callable[..., Cache],
    teacher_forced: Callable[..., Floats],
) -> None:
    ids, encoded = right.ids[:, :8], session.encode(source_ids(case), SOURCE_LENGTHS)
    alone = teacher_forced(session, ids, [3, 1, 4], new_cache(session))
    cache, rows = session.allocate_cache(5, 8), np.array([2, 0, 2, 3, 1])
    session.attach(cache, encoded, rows)
    found = teacher_forced(session, ids[rows], [3, 1, 4], cache)
    np.testing.assert_allclose(found, alone[rows], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", ["t5"])
def test_a_cache_without_sources_takes_part_in_no_step(session: EncoderSession) -> None:
    ids, past = np.zeros((1, 1), np.int64), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="no sources; call encode, then attach"):
        session.decode(session.allocate_cache(1), ids, past)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", ["t5"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [(None, "4 sources and 2 rows"), ([0, 4], "0 <= row < 4"), ([0], "1 rows, the cache has 2")],
)
def test_sources_that_do_not_fit_the_rows_are_refused(
    case: Case, session: EncoderSession, rows: list[int] | None, message: str
) -> None:
    encoded = session.encode(source_ids(case), SOURCE_LENGTHS)
    with pytest.raises(ValueError, match=message):
        session.attach(session.allocate_cache(2), encoded, None if rows is None else np.array(rows))
