"""`export_checkpoint`: what it refuses, what it writes, and what is left when it is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvgraph.export import exporter
from kvgraph.export.bundle import Bundle
from kvgraph.export.exporter import ExportOptions, export_checkpoint, trace_model
from kvgraph.export.torch_session import TorchSession
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.layers import Precision

FLOAT32 = Precision(torch.float32, torch.float32)


def export(checkpoint: Path, output: Path, *, force: bool = False, **options: Any) -> Bundle:
    return export_checkpoint(open_checkpoint(checkpoint), output, ExportOptions(**options), force=force)


@pytest.fixture
def checkpoint(tiny_llama: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(tiny_llama(), tmp_path / "checkpoint"))


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a test that should be refused early comes as far as the tracer."""

    def refuse(*_: object) -> None:
        raise AssertionError("came to the tracer")

    monkeypatch.setattr(exporter, "trace_graph", refuse)


def change_weights(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, checkpoint / "model.safetensors")


def change_config(checkpoint: Path, **changes: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, **changes}))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "dtype is 'float64', expected one of float32, float16, bfloat16"),
        ({"residual_dtype": "int8"}, "residual_dtype is 'int8', expected one of"),
        ({"capacity": 1}, "capacity is 1, expected 2 to 64, the positions of the model"),
        ({"capacity": 65}, "capacity is 65, expected 2 to 64"),
        ({"capacity": -4}, "capacity is -4, expected 2 to 64"),
    ],
)
def test_impossible_option_is_refused_at_once(
    checkpoint: Path, tmp_path: Path, untraced: None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "out", **options)
    assert names(tmp_path) == ["checkpoint"]


def test_existing_output_is_refused_before_anything_is_traced(
    checkpoint: Path, tmp_path: Path, untraced: None
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="use --force to replace it"):
        export(checkpoint, tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"holds no bundle\.json, so --force does not replace it"):
        export(checkpoint, tmp_path / "out", force=True)
    assert names(tmp_path / "out") == ["notes.txt"]


def test_checkpoint_is_never_overwritten(checkpoint: Path, untraced: None) -> None:
    before = names(checkpoint)
    with pytest.raises(FileExistsError):
        export(checkpoint, checkpoint, force=True)
    assert names(checkpoint) == before


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.norm.weight", lambda weights: weights.pop("model.norm.weight")),
        ("model.extra.weight", lambda weights: weights.update({"model.extra.weight": torch.zeros(2)})),
        ("lm_head.weight", lambda weights: weights.update({"lm_head.weight": torch.zeros(96, 20)})),
        ("lm_head.weight", lambda weights: weights.pop("lm_head.weight")),
    ],
    ids=["missing", "unexpected", "another shape", "untied without a head"],
)
def test_weights_that_do_not_fit_are_named_before_anything_is_traced(
    checkpoint: Path,
    tmp_path: Path,
    untraced: None,
    name: str,
    change: Callable[[dict[str, torch.Tensor]], object],
) -> None:
    change_weights(checkpoint, change)
    with pytest.raises(ValueError, match=name):
        export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == ["checkpoint"]


def test_tied_checkpoint_with_another_head_is_refused(
    checkpoint: Path, tmp_path: Path, untraced: None
) -> None:
    """transformers 4 drops such a head, 5 keeps it: what the model is nobody can tell."""
    change_config(checkpoint, tie_word_embeddings=True)
    message = (
        r"'lm_head.weight' differs from 'model.embed_tokens.weight', but config.json says tie_word_embedd"
    )
    with pytest.raises(ValueError, match=message):
        export(checkpoint, tmp_path / "out")


def test_tied_checkpoint_may_repeat_its_embedding(
    tiny_llama: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tied = tiny_llama(tie_word_embeddings=True)
    repeated = Path(shutil.copytree(tied, tmp_path / "repeated"))
    change_weights(repeated, lambda weights: weights.update({"lm_head.weight": embedding(weights).clone()}))
    # The repetition plays no part in tracing.
    traced = []
    monkeypatch.setattr(exporter, "trace_graph", lambda decoder, graph: traced.append(graph))
    checkpoint = open_checkpoint(repeated)
    plan = trace_model(checkpoint.config, FLOAT32, None, checkpoint.weights()).weights
    assert traced == ["prefill", "decode"]
    assert "lm_head.weight" not in plan.sources


def embedding(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return weights["model.embed_tokens.weight"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_value_that_is_not_finite_stops_the_export_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, quick: None, value: float
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(checkpoint, lambda weights: weights[name][3].fill_(value))
    with pytest.raises(ValueError, match=rf"model.safetensors: weight '{name}' holds (nan|inf) in row 3"):
        export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize(("dtype", "value"), [("float16", 70000.0), ("float16", -1e20), ("bfloat16", 3.4e38)])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"])
def test_weight_beyond_the_range_of_its_type_is_named(
    checkpoint: Path, name: str, dtype: str, value: float
) -> None:
    change_weights(checkpoint, lambda weights: weights[name][7].fill_(value))
    with pytest.raises(ValueError, match=rf"{name}: holds .*, more than {dtype}'s"):
        TorchSession.open(open_checkpoint(checkpoint), dtype)


def test_weight_at_the_end_of_the_range_is_kept(checkpoint: Path) -> None:
    name = "model.embed_tokens.weight"
    change_weights(checkpoint, lambda weights: weights[name][7].fill_(65504.0))
    TorchSession.open(open_checkpoint(checkpoint), "float16")


def test_graphs_without_weights_are_those_with_weights(
    checkpoint: Path, tmp_path: Path, exported: Callable[..., Bundle], tiny_llama: Callable[..., Path]
) -> None:
    whole = exported(tiny_llama())
    (checkpoint / "model.safetensors").unlink()
    bundle = export(checkpoint / "config.json", tmp_path / "out", weights=False)
    assert names(tmp_path / "out") == ["bundle.json", "decode.onnx", "prefill.onnx"]
    for graph in ("prefill.onnx", "decode.onnx"):
        assert (tmp_path / "out" / graph).read_bytes() == (whole.path / graph).read_bytes()
    assert bundle.weights == whole.weights
    assert bundle.source["kind"] == "config"


def test_weights_are_not_made_up_from_a_configuration(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a configuration alone; give the checkpoint's directory"):
        export(checkpoint / "config.json", tmp_path / "out")


def test_files_of_the_tokenizer_are_carried_along(checkpoint: Path, tmp_path: Path, quick: None) -> None:
    files = {"tokenizer.json": "{}", "tokenizer_config.json": '{"a": 1}', "chat_template.jinja": "{{ bos }}"}
    for name, content in files.items():
        (checkpoint / name).write_text(content)
    (checkpoint / "README.md").write_text("not carried")
    bundle = export(checkpoint, tmp_path / "out")
    assert "README.md" not in bundle.files
    for name, content in files.items():
        assert (bundle.path / name).read_text() == content
        assert bundle.files[name].size == len(content)


def test_exporting_again_gives_the_same_bundle(checkpoint: Path, tmp_path: Path, quick: None) -> None:
    first = export(checkpoint, tmp_path / "out")
    second = export(checkpoint, tmp_path / "out", force=True)
    assert first == second


def test_forced_export_drops_what_was_built_from_the_old_one(
    checkpoint: Path, tmp_path: Path, quick: None
) -> None:
    bundle = export(checkpoint, tmp_path / "out")
    bundle.target_path("ort-cpu").mkdir(parents=True)
    export(checkpoint, tmp_path / "out", force=True)
    assert not bundle.target_path("ort-cpu").exists()


@pytest.fixture(params=["_write_graphs", "_write_weights", "_check_graphs", "describe_bundle"])
def step(request: pytest.FixtureRequest) -> str:
    """A part of the export during which it may be killed."""
    return request.param


def test_killed_export_leaves_no_bundle_and_the_next_one_cleans_up(
    checkpoint: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    output, whole = tmp_path / "outputs" / "out", getattr(exporter, step)

    def killed(*arguments: object) -> None:
        whole(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(exporter, step, killed)
        assert died(lambda: export(checkpoint, output))
    assert not output.exists()
    assert len(names(output.parent)) == 1
    with pytest.raises(FileNotFoundError, match="no such bundle"):
        Bundle.open(output)
    export(checkpoint, output)
    assert names(output.parent) == ["out"]
    Bundle.open(output, verify=True)


def died(run: Callable[[], object]) -> bool:
    """Run something in a copy of this process, and say whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_full_disk_leaves_nothing_and_says_where(
    checkpoint: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, file_limit: int
) -> None:
    # Graphs are larger than the limit, too; their turn comes before.
    monkeypatch.setattr(exporter, "_write_graphs", lambda *_: None)
    with pytest.raises(OSError, match=r"File too large; make room or choose another output: '.*out'"):
        export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == ["checkpoint"]
