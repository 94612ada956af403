"""What tests of several folders share: where things lie, small models, and whether there is a GPU."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from kvgraph.export.bundle import Bundle
    from kvgraph.export.contract import GraphName
    from kvgraph.runtime.session import Cache, Floats, Ids, Session

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real models, tokenizers and texts beside the repository, which are not part of it."""
    path = REPOSITORY.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("../shared/data is absent")
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a checkpoint of odd sizes and random weights, once for each family and set of changes to its config.

    Weights are large enough for attention and norms to matter, so that a mistake moves the logits by much.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    @functools.cache
    def make(model_type: str, changes: str) -> Path:
        sizes = {"vocab_size": 97, "hidden_size": 20, "intermediate_size": 44, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        limits = {"max_position_embeddings": 64, "initializer_range": 0.3, "tie_word_embeddings": False}
        tokens = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
        config = {**sizes, **heads, **limits, **tokens, **json.loads(changes)}
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))
        for parameter in model.parameters():
            # Norm weights and biases, which transformers leaves at one and zero.
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
        path = tmp_path_factory.mktemp(f"tiny_{model_type}")
        model.save_pretrained(path)
        return path

    return lambda model_type, **changes: make(model_type, json.dumps(changes, sort_keys=True))


@pytest.fixture(scope="session")
def tiny_llama(tiny_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """The same for Llama."""
    return functools.partial(tiny_checkpoint, "llama")


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], ModuleType]:
    """Imports a file: what tests share lies in no package."""

    def load(path: Path) -> ModuleType:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Dataclasses look their own module up.
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def packers(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """Writers of quantized checkpoints, see `tests/packers.py`."""
    return load_module(REPOSITORY / "tests" / "packers.py")


@pytest.fixture(scope="session")
def write_gguf(load_module: Callable[[Path], ModuleType]) -> Callable[..., dict[str, torch.Tensor]]:
    """Writes a checkpoint directory as a GGUF file, see `tests/gguf_writer.py`."""
    write: Callable[..., dict[str, torch.Tensor]] = load_module(
        REPOSITORY / "tests" / "gguf_writer.py"
    ).write_gguf
    return write


@pytest.fixture(scope="session")
def quick_tracing() -> Iterator[None]:
    """Keeps tracing, which takes seconds, from doing a thing twice.

    Exports of one model that differ in other options than types have the same pieces; and torch.onnx.export looks
    through all operators, at every call, for those that are to be decomposed.
    """
    from torch.export import exported_program
    from torch.onnx._internal.exporter import _decomp

    from kvgraph.export import exporter
    from kvgraph.export.architecture import TracedGraph
    from kvgraph.models.encoder_decoder import Model

    traced: dict[tuple[str, ...], TracedGraph] = {}
    trace_graph = exporter.trace_graph

    def trace_once(model: Model, graph: GraphName) -> TracedGraph:
        key = (repr(model.config), repr(model.precision), graph)
        if key not in traced:
            traced[key] = trace_graph(model, graph)
        return traced[key]

    table = functools.cache(_decomp.create_onnx_friendly_decomposition_table)
    composite = functools.cache(exported_program._collect_all_valid_cia_ops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_decomp, "create_onnx_friendly_decomposition_table", lambda ops: table(frozenset(ops)))
        patch.setattr(exported_program, "_collect_all_valid_cia_ops", composite)
        patch.setattr(exporter, "trace_graph", trace_once)
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, quick_tracing: None) -> Callable[..., Bundle]:
    """Exports a checkpoint directory, once for each set of `ExportOptions`: tracing takes seconds."""
    from kvgraph.export.exporter import ExportOptions, export_checkpoint
    from kvgraph.models.checkpoint import open_checkpoint

    @functools.cache
    def export(checkpoint: Path, options: ExportOptions) -> Bundle:
        output = tmp_path_factory.mktemp("exported") / "bundle"
        return export_checkpoint(open_checkpoint(checkpoint), output, options)

    def with_options(checkpoint: Path, **options: Any) -> Bundle:
        return export(checkpoint, ExportOptions(**options))

    return with_options


@pytest.fixture(scope="session")
def teacher_forced() -> Callable[..., Floats]:
    """Logits of a session [B, n, V] at every position of ids [B, n], fed in chunks of `sizes` tokens.

    The first chunk is prefilled; after it, chunks of one token are decoded and longer ones prefilled.
    """

    import numpy as np

    def run(session: Session, ids: Ids, sizes: Sequence[int], cache: Cache | None = None) -> Floats:
        assert sum(sizes) == ids.shape[1]
        cache = cache or session.allocate_cache(ids.shape[0])
        parts, start = [], 0
        prompt = sizes[0] + sum(itertools.takewhile(lambda size: size > 1, sizes[1:]))
        for size in sizes:
            chunk, past = ids[:, start : start + size], np.full(ids.shape[0], start)
            if size == 1 and start:
                parts.append(session.decode(cache, chunk, past).copy())
            else:
                rows = np.tile(np.arange(size), (ids.shape[0], 1))
                # What is left of the prompt: a rotary base that depends on it is then that of a single prefill.
                rest = np.full(ids.shape[0], max(size, prompt - start))
                parts.append(session.prefill(cache, chunk, past, rows, rest))
            start += size
        return np.concatenate(parts, axis=1)

    return run


@functools.cache
def why_no_gpu() -> str | None:
    """Why the NVIDIA driver has no device to offer, or None if it has one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 is absent"
    if (status := driver.cuInit(0)) != 0:
        return f"the NVIDIA driver does not start: cuInit returned {status}"
    count = ctypes.c_int(0)
    if (status := driver.cuDeviceGetCount(ctypes.byref(count))) != 0:
        return f"the NVIDIA driver counts no devices: cuDeviceGetCount returned {status}"
    return None if count.value > 0 else "the NVIDIA driver sees no device"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, keep the tests of a family together, rather than all of a file's."""
    from xdist.scheduler import LoadFileScheduling

    class FamilyScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            family = re.match(r"(.*/families)/[^[]*\[(\w+)", nodeid)
            return super()._split_scope(nodeid) if family is None else "/".join(family.groups())

    return FamilyScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and (reason := why_no_gpu()) is not None:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=reason))
