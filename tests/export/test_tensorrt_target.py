"""From a bundle to `targets/tensorrt-rtx/`, which needs no GPU. Running engines does: see tests/runtime/trt."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

from kvgraph.cli import main
from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import CONTEXT_LENGTH
from kvgraph.export.targets.tensorrt import TensorRTOptions, build_tensorrt
from kvgraph.export.targets.tensorrt_graph import lower_for_tensorrt
from kvgraph.runtime.target import Limits, Target
from kvgraph.runtime.tensorrt_module import collect_messages, load_tensorrt

AMPERE_AND_NEWER = (80, 86, 89, 120)
ADA = TensorRTOptions(compute_capabilities=(89,))

Exported = Callable[..., Bundle]
TinyLlama = Callable[..., Path]


@pytest.fixture
def bundle(exported: Exported, tiny_llama: TinyLlama, tmp_path: Path) -> Bundle:
    """A float32 bundle of this test's own, without targets."""
    source = exported(tiny_llama(), dtype="float32").path
    shutil.copytree(source, tmp_path / "bundle", ignore=shutil.ignore_patterns("targets"))
    return Bundle.open(tmp_path / "bundle")


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_builds_for_every_gpu(exported: Exported, tiny_llama: TinyLlama, dtype: str, head_dim: int) -> None:
    bundle = exported(tiny_llama(head_dim=head_dim), dtype=dtype)
    gpus = (75, *AMPERE_AND_NEWER) if dtype == "float16" else AMPERE_AND_NEWER
    target = build_tensorrt(bundle, "tensorrt-rtx", TensorRTOptions(max_batch=2, compute_capabilities=gpus))
    assert target.compute_capabilities == gpus
    assert list(target.files) == ["model.engine"]
    assert [target.graphs["decode"].profile, target.graphs["prefill"].profile] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("engines", ["one", "two"])
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_builds_for_each_gpu_alone(
    exported: Exported, tiny_llama: TinyLlama, dtype: str, head_dim: int, engines: Any
) -> None:
    bundle = exported(tiny_llama(head_dim=head_dim), dtype=dtype)
    for gpu in (75, *AMPERE_AND_NEWER) if dtype == "float16" else AMPERE_AND_NEWER:
        options = TensorRTOptions(engines=engines, compute_capabilities=(gpu,))
        assert build_tensorrt(bundle, "tensorrt-rtx", options).compute_capabilities == (gpu,)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 12, "num_key_value_heads": 1},
        {"head_dim": 20, "num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ],
    ids=["multi-query", "tied, biases", "dynamic rope"],
)
def test_builds_every_form_of_the_family(
    exported: Exported, tiny_llama: TinyLlama, changes: dict[str, Any]
) -> None:
    bundle = exported(tiny_llama(**changes), dtype="float16")
    assert build_tensorrt(bundle, "tensorrt-rtx").compute_capabilities == (75, 80, 86, 89, 120, 121)


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        ("float16", 128),
        ("bfloat16", 64),
        pytest.param("float16", 64, marks=pytest.mark.slow),
        pytest.param("bfloat16", 128, marks=pytest.mark.slow),
    ],
)
def test_bytes_with_a_capacity_build_without_kvgraph(
    exported: Exported, tiny_llama: TinyLlama, dtype: str, head_dim: int
) -> None:
    trt: Any = load_tensorrt("tensorrt-rtx")
    bundle = exported(tiny_llama(head_dim=head_dim), dtype=dtype, capacity=16)
    for graph in ("prefill", "decode"):
        path = bundle.graph_path(graph)
        log = collect_messages(trt)
        builder = trt.Builder(log)
        network = builder.create_network(0)
        parser = trt.OnnxParser(network, log)
        assert parser.parse(path.read_bytes(), str(path)), log.errors()
        config = builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(trt.ComputeCapability.SM89, 0)
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            smallest, largest = ([size if dim < 0 else dim for dim in tensor.shape] for size in (1, 4))
            profile.set_shape(tensor.name, smallest, largest, largest)
        config.add_optimization_profile(profile)
        assert builder.build_serialized_network(network, config) is not None, log.errors()


def test_the_bundle_is_left_as_it_was(bundle: Bundle) -> None:
    build_tensorrt(bundle, "tensorrt-rtx", ADA)
    Bundle.open(bundle.path, verify=True)
    assert not [path for path in bundle.path.rglob("*") if ".tmp-" in path.name]


def test_target_json_says_what_was_built(bundle: Bundle) -> None:
    options = TensorRTOptions(max_batch=3, max_context=32, prefill_chunk=8, compute_capabilities=(89, 120))
    target = build_tensorrt(bundle, "tensorrt-rtx", options)
    data = json.loads((target.path / "target.json").read_text())
    assert data["name"] == "tensorrt-rtx"
    assert data["runtime_version"] == load_tensorrt("tensorrt-rtx").__version__
    assert data["compute_capabilities"] == [89, 120]
    assert data["bundle_digest"] == bundle.digest()
    assert data["limits"] == {"max_batch": 3, "max_context": 32, "prefill_chunk": 8, "max_source": None}
    assert data["options"] == {"engines": "one"}
    assert data["contract"]["state"][0]["shape"] == ["B", 2, 32, 8]
    assert data["graphs"]["prefill"]["shapes"]["input_ids"] == [[1, 1], [3, 8], [3, 8]]
    assert data["graphs"]["decode"]["shapes"]["input_ids"] == [[1, 1], [3, 1], [3, 1]]
    assert data["graphs"]["decode"]["shapes"][CONTEXT_LENGTH] == [[1], [32], [32]]
    assert data["build_time_s"] > 0
    assert data["peak_memory_bytes"] > 100e6
    assert json.loads(json.dumps(Target.open(bundle, "tensorrt-rtx", verify=True).to_json())) == data


@pytest.mark.parametrize("max_batch", [1, 4])
def test_one_engine_holds_the_weights_once(exported: Exported, tiny_llama: TinyLlama, max_batch: int) -> None:
    bundle = exported(tiny_llama(intermediate_size=65536), dtype="float16")
    sizes = {}
    for engines in ("one", "two"):
        options = TensorRTOptions(max_batch=max_batch, engines=engines, compute_capabilities=(89,))
        target = build_tensorrt(bundle, "tensorrt-rtx", options)
        sizes[engines] = sum(entry.size for entry in target.files.values())
    assert sizes["two"] - sizes["one"] > 0.8 * bundle.files["weights.safetensors"].size


def test_two_engines_serve_a_graph_each(bundle: Bundle) -> None:
    target = build_tensorrt(bundle, "tensorrt-rtx", replace(ADA, engines="two"))
    assert sorted(target.files) == ["decode.engine", "prefill.engine"]
    assert target.graphs["decode"].source == "decode"
    assert "logit_positions" not in target.graphs["decode"].shapes


def test_graphs_with_different_weights_get_two_engines(bundle: Bundle) -> None:
    path = bundle.graph_path("decode")
    model = onnx.load(path, load_external_data=False)
    projections = [
        one for one in model.graph.initializer if one.name.endswith(("gate_proj.weight", "up_proj.weight"))
    ]
    first, second = projections[:2]
    del first.external_data[:]
    first.external_data.extend(second.external_data)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(
        ValueError, match="different weights, which one engine cannot hold; build with --engines two"
    ):
        build_tensorrt(bundle, "tensorrt-rtx", TensorRTOptions(engines="one"))
    assert build_tensorrt(bundle, "tensorrt-rtx", ADA).options == {"engines": "two"}


def test_residual_outputs_of_a_debug_export_are_left_out(exported: Exported, tiny_llama: TinyLlama) -> None:
    bundle = exported(tiny_llama(), dtype="float32", debug_outputs=True)
    graph = lower_for_tensorrt(bundle.graph_path("prefill"), "prefill", bundle.contract, 16)
    outputs = [value.name for value in onnx.load_from_string(graph.model).graph.output]
    assert outputs == [tensor.name for tensor in bundle.contract.graph("prefill").outputs]


def test_stories260k_builds(shared_data: Path, exported: Exported) -> None:
    bundle = exported(shared_data / "stories260k", dtype="float16")
    assert build_tensorrt(bundle, "tensorrt-rtx", replace(ADA, max_batch=4)).limits == Limits(4, 512, 512)


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [("bfloat16", "has no bfloat16"), ("float32", "computes matrix products in float16 alone")],
)
def test_turing_is_refused_before_any_work(bundle: Bundle, dtype: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"the bundle is {dtype}, SM75 {reason}; leave 75 out"):
        build_tensorrt(
            replace(bundle, dtype=dtype), "tensorrt-rtx", TensorRTOptions(compute_capabilities=(75, 89))
        )
    assert not (bundle.path / "targets").exists()


def test_unknown_gpu_is_refused_with_those_that_are_known(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="builds for 75, 80, 86, 89, 120, 121; data-centre GPUs such as 90"):
        build_tensorrt(bundle, "tensorrt-rtx", TensorRTOptions(compute_capabilities=(90,)))


def test_tensorrt_builds_for_the_gpu_it_finds(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    # The two flavours have one API, so the one that is here can stand in for the other.
    monkeypatch.setattr(
        "kvgraph.export.targets.tensorrt.load_tensorrt", lambda flavour: load_tensorrt("tensorrt-rtx")
    )
    monkeypatch.setattr(
        "kvgraph.export.targets.compute_capabilities.Cuda", lambda: SimpleNamespace(compute_capability=90)
    )
    target = build_tensorrt(bundle, "tensorrt")
    assert (target.name, target.compute_capabilities) == ("tensorrt", (90,))
    with pytest.raises(ValueError, match="--compute-capability is for TensorRT-RTX"):
        build_tensorrt(bundle, "tensorrt", ADA)


def test_tensorrt_without_a_gpu_names_the_flavour_that_needs_none(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_device() -> None:
        raise RuntimeError("cudaSetDevice failed")

    monkeypatch.setattr(
        "kvgraph.export.targets.tensorrt.load_tensorrt", lambda flavour: load_tensorrt("tensorrt-rtx")
    )
    monkeypatch.setattr("kvgraph.export.targets.compute_capabilities.Cuda", no_device)
    with pytest.raises(
        RuntimeError, match=r"offers none \(cudaSetDevice failed\); --target tensorrt-rtx builds without"
    ):
        build_tensorrt(bundle, "tensorrt")


def test_a_bundle_without_weights_is_refused(bundle: Bundle) -> None:
    bare = replace(
        bundle, files={name: entry for name, entry in bundle.files.items() if "weights" not in name}
    )
    with pytest.raises(
        ValueError, match="has graphs and no weights, nothing to build; export without --no-weights"
    ):
        build_tensorrt(bare, "tensorrt-rtx", ADA)


def test_a_failed_build_leaves_the_earlier_target(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build_tensorrt(bundle, "tensorrt-rtx", ADA)

    def fail(*arguments: object) -> memoryview:
        raise RuntimeError("no")

    monkeypatch.setattr("kvgraph.export.targets.tensorrt.build_engine", fail)
    with pytest.raises(RuntimeError, match="no"):
        build_tensorrt(bundle, "tensorrt-rtx", ADA)
    assert Target.open(bundle, "tensorrt-rtx", verify=True) == before
    assert [path.name for path in (bundle.path / "targets").iterdir()] == ["tensorrt-rtx"]


def test_the_command_prints_one_line(bundle: Bundle, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--max-batch", "2", "--max-context", "32", "--compute-capability", "89,120"]
    assert main(["build", str(bundle.path), "--target", "tensorrt-rtx", *arguments]) == 0
    output = capfd.readouterr()
    assert output.out.count("\n") == 1
    assert "targets/tensorrt-rtx: tensorrt-rtx 1." in output.out
    assert "SM89, SM120, model.engine" in output.out
    assert output.err == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tensorrt-rtx", "--compute-capability", "75"], "SM75 computes matrix products in float16 alone"),
        (["tensorrt-rtx", "--compute-capability", "x"], "expected numbers such as 89 or 89,120"),
        (["tensorrt-rtx", "--max-context", "1000"], "--max-context is 1000, expected 2 to 64"),
        (["ort-cpu", "--max-batch", "2"], "--max-batch is for tensorrt and tensorrt-rtx"),
        (["tensorrt"], "tensorrt needs the package tensorrt; install kvgraph[tensorrt]"),
    ],
)
def test_the_command_refuses_in_one_line(
    bundle: Bundle,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert main(["build", str(bundle.path), "--target", *flags]) == 2
    output = capfd.readouterr()
    assert message in output.err
    assert output.err.count("\n") == 1
    assert not (bundle.path / "targets").exists()
