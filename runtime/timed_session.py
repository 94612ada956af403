"""A session that notes when each of its calls began and ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kvgraph.export.contract import Contract, GraphName
from kvgraph.runtime.session import Cache, Floats, Ids, Session, SessionInfo


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a session, in seconds of `time.perf_counter`."""

    graph: GraphName
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


class TimedSession:
    """Passes every call on, see `kvgraph.runtime.session.Session`.

    Attributes:
        calls: Every call so far, in order.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.calls: list[Call] = []

    @property
    def contract(self) -> Contract:
        """What the graphs promise."""
        return self._session.contract

    @property
    def info(self) -> SessionInfo:
        """What the session runs on."""
        return self._session.info

    def allocate_cache(self, batch_size: int, limit: int | None = None) -> Cache:
        """The session's own cache."""
        return self._session.allocate_cache(batch_size, limit)

    def prefill(
        self,
        cache: Cache,
        input_ids: Ids,
        past_length: Ids,
        logit_positions: Ids,
        new_length: Ids | None = None,
    ) -> Floats:
        """Logits [B, N, V] of the session."""
        start = time.perf_counter()
        logits = self._session.prefill(cache, input_ids, past_length, logit_positions, new_length)
        self.calls.append(Call("prefill", start, time.perf_counter()))
        return logits

    def decode(self, cache: Cache, input_ids: Ids, past_length: Ids) -> Floats:
        """Logits [B, 1, V] of the session."""
        start = time.perf_counter()
        logits = self._session.decode(cache, input_ids, past_length)
        self.calls.append(Call("decode", start, time.perf_counter()))
        return logits

    def hidden_states(self) -> tuple[Floats, ...]:
        """Residuals of the session's latest call."""
        return self._session.hidden_states()

    def gaps_s(self) -> list[float]:
        """Seconds between the end of a call and the start of the next, for each decode call: the loop's own time."""
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return [after.start_s - before.end_s for before, after in pairs if after.graph == "decode"]
