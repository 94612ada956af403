"""Chosen steps of a comparison as Polygraphy JSON: replay them on any of its runners.

`polygraphy run` reads inputs with `--load-inputs`, a list with one dictionary of arrays for each iteration, and
reference outputs with `--load-outputs`, a `RunResults`. Its JSON marks each object with the name of its class and
holds arrays as base64 of the .npy form; this module writes that form itself and needs no Polygraphy.
"""

from __future__ import annotations

import base64
import io
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgraph.export.contract import (
    GRAPHS,
    INPUT_IDS,
    LOGIT_POSITIONS,
    LOGITS,
    NEW_LENGTH,
    PAST_LENGTH,
    Contract,
    GraphName,
    StateTensor,
)
from kvgraph.runtime.element_types import element_type
from kvgraph.runtime.parity import Step, allocate_for
from kvgraph.runtime.parity_bands import Band
from kvgraph.runtime.parity_metrics import largest
from kvgraph.runtime.parity_report import ParityReport
from kvgraph.runtime.session import Cache, Session

COMMANDS_FILE = "commands.txt"
_CLASS = "polygraphy_class"
_NUMPY_CACHES = ("float32", "float16")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Everything that went into a graph and what should come out, by the names of the contract."""

    graph: GraphName
    inputs: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, NDArray[Any]]


def steps_worth_replaying(report: ParityReport) -> list[int]:
    """First prefill, first and last decode, the worst step and the first out of band."""
    numbers = {step.step for step in (report.steps[0], report.steps[-1], report.worst)}
    decodes = [step.step for step in report.steps if step.graph == "decode"]
    numbers.update(decodes[:1])
    if report.first_out is not None:
        numbers.add(report.first_out.step)
    return sorted(numbers)


def record_steps(
    reference: Session, contract: Contract, steps: Sequence[Step], chosen: Collection[int]
) -> list[RecordedStep]:
    """Run the steps through the reference and keep the chosen ones as the candidate's graphs take them.

    Prefill gives the logits of each row's last token alone, to keep the files small.

    Args:
        reference: Whose numbers are the outputs.
        contract: Of the graphs that will be run: dtypes, and the capacity where it is fixed.
        steps: From `plan_steps`.
        chosen: Numbers of the steps to keep.

    Raises:
        ValueError: The cache is of a type that NumPy files do not have, or in delta form.
    """
    for tensor in contract.state:
        if tensor.dtype not in _NUMPY_CACHES or tensor.form != "scatter":
            raise ValueError(
                f"{tensor.name} is {tensor.dtype} in {tensor.form} form, Polygraphy's JSON holds caches in scatter "
                f"form of {' or '.join(_NUMPY_CACHES)}; compare a bundle of one of these types"
            )
    cache = allocate_for(steps, reference)
    recorded = []
    for step in steps[: max(chosen) + 1]:
        before = _states(contract, cache, past=True) if step.index in chosen else {}
        positions = np.maximum(step.valid - 1, 0)[:, None]
        if step.graph == "decode":
            logits = reference.decode(cache, step.input_ids, step.past_length)
        else:
            logits = reference.prefill(cache, step.input_ids, step.past_length, positions, step.new_length)
        if step.index in chosen:
            inputs = {INPUT_IDS: step.input_ids, PAST_LENGTH: step.past_length}
            if contract.takes_new_length:
                inputs[NEW_LENGTH] = step.new_length
            if step.graph == "prefill":
                inputs[LOGIT_POSITIONS] = positions
            outputs = {LOGITS: logits.copy(), **_states(contract, cache, past=False)}
            recorded.append(RecordedStep(step.graph, {**inputs, **before}, outputs))
    return recorded


def _states(contract: Contract, cache: Cache, past: bool) -> dict[str, NDArray[Any]]:
    """Every state tensor as the graphs take it, by its input or output name."""
    return {tensor.name if past else tensor.output: _graph_buffer(tensor, cache) for tensor in contract.state}


def _graph_buffer(tensor: StateTensor, cache: Cache) -> NDArray[Any]:
    content = cache.read(tensor.name).astype(element_type(tensor.dtype).carrier)
    missing = 0 if tensor.capacity is None else tensor.capacity - content.shape[2]
    return np.pad(content, ((0, 0), (0, 0), (0, missing), (0, 0)))


def save_polygraphy(
    directory: str | Path,
    recorded: Sequence[RecordedStep],
    graphs: Mapping[GraphName, Path],
    weights: Path,
    band: Band,
) -> Path:
    """Write recorded steps as Polygraphy JSON, and the commands that replay them.

    Args:
        directory: Is made; files of the same names are replaced.
        recorded: From `record_steps`.
        graphs: The ONNX files.
        weights: The directory of their external data.
        band: Becomes the tolerances of the commands.

    Returns:
        The text file with one `polygraphy run` command for each graph.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    commands = []
    for graph in GRAPHS:
        steps = [step for step in recorded if step.graph == graph]
        if not steps:
            continue
        inputs, outputs = directory / f"{graph}.inputs.json", directory / f"{graph}.outputs.json"
        inputs.write_text(json.dumps([_arrays(step.inputs) for step in steps]), encoding="utf-8")
        outputs.write_text(json.dumps(_run_results([step.outputs for step in steps])), encoding="utf-8")
        files = ["--load-inputs", str(inputs.resolve()), "--load-outputs", str(outputs.resolve())]
        model = graphs[graph].resolve()
        place = [] if model.parent == weights.resolve() else ["--external-data-dir", str(weights.resolve())]
        command = ["polygraphy", "run", str(model), "--onnxrt", *place, *files]
        commands.append(shlex.join([*command, *_tolerances(steps, band)]))
    path = directory / COMMANDS_FILE
    path.write_text("".join(f"{command}\n" for command in commands), encoding="utf-8")
    return path


def _tolerances(steps: Sequence[RecordedStep], band: Band) -> list[str]:
    """Each output's largest tolerance over the steps, none of it relative to the single element."""
    names = steps[0].outputs
    scales = {name: max(largest(step.outputs[name]) for step in steps) for name in names}
    return [
        "--rtol",
        "0",
        "--atol",
        *(f"{name}:{band.tolerance(scale):.3g}" for name, scale in scales.items()),
    ]


def _run_results(iterations: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, Any]:
    runner = "kvgraph-reference"
    results = [
        {
            "outputs": {
                name: {"values": value, _CLASS: "LazyArray"} for name, value in _arrays(outputs).items()
            },
            "runtime": None,
            "runner_name": runner,
            _CLASS: "IterationResult",
        }
        for outputs in iterations
    ]
    return {"lst": [[runner, results]], _CLASS: "RunResults"}


def _arrays(arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    encoded = {}
    for name, array in arrays.items():
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        encoded[name] = {"array": base64.b64encode(file.getvalue()).decode("ascii"), _CLASS: "ndarray"}
    return encoded
