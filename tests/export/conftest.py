"""Oracles and runners of the export stage's tests."""

from __future__ import annotations

import functools
import resource
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from kvgraph.export import exporter
from kvgraph.export.bundle import Bundle
from kvgraph.export.exporter import TracedModel, trace_model
from kvgraph.export.targets.ort_cpu import build_ort_cpu
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.layers import Precision
from kvgraph.runtime.kernels import library_path
from kvgraph.runtime.open import open_session
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.session import Cache, Floats, Ids, Session


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], PreTrainedModel]:
    """A checkpoint as transformers loads it, in float32."""

    @functools.cache
    def load(checkpoint: Path) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        )
        return model.eval().requires_grad_(False)

    return load


@pytest.fixture(scope="session")
def reference_run(reference: Callable[[Path], PreTrainedModel]) -> Callable[..., tuple[Floats, DynamicCache]]:
    """Runs transformers over ids [B, n] in chunks of `sizes` (default: at once): logits [B, n, V], and the cache."""

    def run(checkpoint: Path, ids: Ids, sizes: Sequence[int] | None = None) -> tuple[Floats, DynamicCache]:
        model, cache, parts, start = reference(checkpoint), DynamicCache(), [], 0
        # A dynamic rope keeps the frequencies of its longest call until a short one comes.
        model(torch.zeros(1, 1, dtype=torch.int64))
        for size in sizes or [ids.shape[1]]:
            chunk = torch.from_numpy(ids[:, start : start + size])
            with warnings.catch_warnings():
                # The cache's keyword is renamed in the middle of version 5.
                warnings.simplefilter("ignore", FutureWarning)
                parts.append(model(chunk, past_key_values=cache).logits)
            start += size
        return torch.cat(parts, dim=1).numpy(), cache

    return run


@pytest.fixture(scope="session")
def reference_logits(reference_run: Callable[..., tuple[Floats, DynamicCache]]) -> Callable[..., Floats]:
    """The logits of `reference_run` alone."""
    return lambda *arguments: reference_run(*arguments)[0]


@pytest.fixture(scope="session")
def ort() -> Callable[..., OrtSession]:
    """A bundle under ONNX Runtime; sessions are stateless, so each is opened once."""

    @functools.cache
    def open_path(path: Path, debug_outputs: bool) -> OrtSession:
        return OrtSession(Bundle.open(path), threads=1, debug_outputs=debug_outputs)

    return lambda bundle, debug_outputs=False: open_path(bundle.path, debug_outputs)


@pytest.fixture(scope="session")
def kernels() -> Callable[[Bundle], Session]:
    """A bundle built for a CPU with kvgraph's own kernels."""

    @functools.cache
    def open_path(path: Path) -> Session:
        if library_path() is None:
            pytest.skip("kvgraph's CPU kernels are not compiled in this installation")
        bundle = Bundle.open(path)
        build_ort_cpu(bundle)
        return open_session(bundle, "ort-cpu", threads=1)

    return lambda bundle: open_path(bundle.path)


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Floats]:
    """Logits [B, 1 + n, V] of rows of unequal `lengths`, prefilled together and padded, then of n tokens decoded."""

    def run(
        session: Session, ids: Ids, lengths: Sequence[int], decoded: int, cache: Cache | None = None
    ) -> Floats:
        past, longest = np.array(lengths), max(lengths)
        cache = cache or session.allocate_cache(len(lengths), longest + decoded)
        padded = np.where(np.arange(longest) < past[:, None], ids[:, :longest], 0)
        steps = [session.prefill(cache, padded, np.zeros_like(past), past[:, None] - 1, past).copy()]
        for step in range(decoded):
            chosen = np.take_along_axis(ids, (past + step)[:, None], 1)
            steps.append(session.decode(cache, chosen, past + step).copy())
        return np.concatenate(steps, axis=1)

    return run


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., Ids]:
    """Token ids [B, n] below `vocab_size`, the same at every call."""

    def make(batch_size: int, length: int, vocab_size: int = 97) -> Ids:
        return np.random.default_rng(5).integers(0, vocab_size, (batch_size, length))

    return make


@pytest.fixture(scope="session")
def traced(tiny_llama: Callable[..., Path], quick_tracing: None) -> TracedModel:
    checkpoint = open_checkpoint(tiny_llama())
    precision = Precision(torch.float32, torch.float32)
    return trace_model(checkpoint.config, precision, None, checkpoint.weights())


@pytest.fixture
def quick(traced: TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports take one trace: what they do after it is tested."""
    monkeypatch.setattr(exporter, "trace_model", lambda *_: traced)


@pytest.fixture
def file_limit() -> Iterator[int]:
    """A limit on file sizes, which writes run into as they do into a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="session")
def packed_reference(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """`packed_operators.py`: the operators of kvgraph's CPU kernels in NumPy."""
    return load_module(Path(__file__).with_name("packed_operators.py"))
