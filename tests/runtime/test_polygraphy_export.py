from __future__ import annotations

import base64
import dataclasses
import io
import json
import shlex

import numpy as np
import onnxruntime
import pytest

from kvgraph.export.contract import GRAPHS, LOGIT_POSITIONS, LOGITS
from kvgraph.runtime.ort import OrtSession
from kvgraph.runtime.parity import compare_sessions, plan_steps
from kvgraph.runtime.parity_bands import BANDS
from kvgraph.runtime.polygraphy_export import record_steps, save_polygraphy, steps_worth_replaying

BAND = BANDS["float32"]
ROWS = [np.arange(9), np.array([5, 2, 8, 0])]


def decode(value):
    """Polygraphy's JSON as its own decoder builds it, with plain objects for its classes."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("polygraphy_class")
    if kind == "ndarray":
        return np.load(io.BytesIO(base64.b64decode(value["array"], validate=True)), allow_pickle=False)
    if kind == "LazyArray":
        return decode(value["values"])
    if kind == "IterationResult":
        assert set(value) == {"outputs", "runtime", "runner_name", "polygraphy_class"}
        return decode(value["outputs"])
    if kind == "RunResults":
        return decode(value["lst"])
    assert kind is None
    return {key: decode(item) for key, item in value.items()}


@pytest.fixture(scope="module")
def bundle(tiny_llama, exported):
    return exported(tiny_llama())


@pytest.fixture(scope="module")
def session(bundle):
    return OrtSession(bundle, threads=1)


@pytest.fixture
def saved(bundle, session, tmp_path):
    recorded = record_steps(session, bundle.contract, plan_steps(ROWS, 3), [0, 2, 5])
    graphs = {graph: bundle.graph_path(graph) for graph in GRAPHS}
    return save_polygraphy(tmp_path / "steps", recorded, graphs, bundle.path, BAND)


def test_onnx_runtime_replays_every_recorded_step(bundle, saved):
    counts = {}
    for graph in GRAPHS:
        inputs, outputs = (
            decode(json.loads((saved.parent / f"{graph}.{kind}.json").read_text()))
            for kind in ("inputs", "outputs")
        )
        [[_, iterations]] = outputs
        counts[graph] = len(inputs)
        runner = onnxruntime.InferenceSession(bundle.graph_path(graph), providers=["CPUExecutionProvider"])
        for feed, expected in zip(inputs, iterations, strict=True):
            for name, value in zip(expected, runner.run(list(expected), feed), strict=True):
                np.testing.assert_allclose(value, expected[name], atol=1e-5)
    assert counts == {"prefill": 1, "decode": 2}


def test_a_prefill_gives_the_logits_of_each_rows_last_token(session, bundle):
    (first,) = record_steps(session, bundle.contract, plan_steps(ROWS, 9), [0])
    assert first.inputs[LOGIT_POSITIONS].tolist() == [[8], [3]]
    assert first.outputs[LOGITS].shape == (2, 1, 97)


def test_a_capacity_that_is_written_in_is_filled_up(session, bundle):
    state = [
        dataclasses.replace(tensor, shape=(*tensor.shape[:2], 48, *tensor.shape[3:]))
        for tensor in bundle.contract.state
    ]
    contract = dataclasses.replace(bundle.contract, state=tuple(state))
    (step,) = record_steps(session, contract, plan_steps(ROWS, 3), [1])
    assert {step.inputs[tensor.name].shape for tensor in state} == {(2, 2, 48, 8)}
    assert {step.outputs[tensor.output].shape for tensor in state} == {(2, 2, 48, 8)}


def test_a_float16_cache_is_given_as_float16(session, bundle):
    state = tuple(dataclasses.replace(tensor, dtype="float16") for tensor in bundle.contract.state)
    (step,) = record_steps(
        session, dataclasses.replace(bundle.contract, state=state), plan_steps(ROWS, 3), [1]
    )
    assert {step.inputs[tensor.name].dtype for tensor in state} == {np.dtype(np.float16)}


def test_a_type_that_numpy_lacks_is_refused(session, bundle):
    state = tuple(dataclasses.replace(tensor, dtype="bfloat16") for tensor in bundle.contract.state)
    with pytest.raises(ValueError, match="key is bfloat16 in scatter form, Polygraphy's JSON holds"):
        record_steps(session, dataclasses.replace(bundle.contract, state=state), plan_steps(ROWS, 3), [1])


def test_the_first_the_last_and_the_worst_steps_are_chosen(session):
    report = compare_sessions(session, session, ROWS, prefill=3, band=BAND, chunk=2)
    steps = list(report.steps)
    steps[4] = dataclasses.replace(steps[4], logits=dataclasses.replace(steps[4].logits, max_abs=1.0))
    report = dataclasses.replace(report, steps=tuple(steps))
    # Two chunks of prefill, then six tokens.
    assert steps_worth_replaying(report) == [0, 2, 4, 7]


def test_polygraphy_reads_the_files(saved):
    pytest.importorskip("polygraphy", reason="polygraphy is not installed")
    from polygraphy.comparator import RunResults
    from polygraphy.json import load_json

    feeds = load_json(str(saved.parent / "decode.inputs.json"))
    results = RunResults.load(str(saved.parent / "decode.outputs.json"))
    ((_, iterations),) = results.items()
    assert len(feeds) == len(iterations) == 2
    assert iterations[0]["logits"].shape == (2, 1, 97)


def test_the_commands_name_the_files_and_each_outputs_tolerance(bundle, saved):
    commands = [shlex.split(line) for line in saved.read_text().splitlines()]
    assert [command[:4] for command in commands] == [
        ["polygraphy", "run", str(bundle.graph_path(graph).resolve()), "--onnxrt"] for graph in GRAPHS
    ]
    for command in commands:
        tolerances = command[command.index("--atol") + 1 :]
        assert [entry.partition(":")[0] for entry in tolerances] == [
            tensor.name for tensor in bundle.contract.graph("decode").outputs
        ]


def test_the_weights_of_a_graph_elsewhere_are_named(bundle, session, tmp_path):
    recorded = record_steps(session, bundle.contract, plan_steps(ROWS, 3), [0])
    graphs = {graph: bundle.path / "targets" / "ort-cpu" / f"{graph}.onnx" for graph in GRAPHS}
    command = shlex.split(save_polygraphy(tmp_path, recorded, graphs, bundle.path, BAND).read_text())
    assert command[command.index("--external-data-dir") + 1] == str(bundle.path.resolve())
