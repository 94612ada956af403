"""What quantization did, read back from the disk: every weight against its source, every scale, and what was left.

The files are read as a runtime reads them (`kvgraph.quant.reload`). A weight that was written to the wrong place, or
not at all, gives noise and not its source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from kvgraph.export.bundle import Bundle
from kvgraph.export.contract import GraphName
from kvgraph.export.in_order import map_in_order
from kvgraph.quant.bundle_weights import BundleWeights, FloatWeights, as_float32
from kvgraph.quant.compiled_comparison import compare_compiled
from kvgraph.quant.formats import Floats
from kvgraph.quant.plan import Rescaling
from kvgraph.quant.reload import (
    DequantizedWeight,
    check_places,
    find_dequantized,
    input_scales,
    read_rows,
)
from kvgraph.quant.storage import StoredWeight
from kvgraph.quant.tensor_jobs import GraphChoice, TensorJob
from kvgraph.quant.tensor_writer import BAND_WEIGHTS, PART_WEIGHTS, rescale

# Even four bits in the coarsest granularity give more than ten; an unrelated matrix gives less than zero.
_LEAST_SNR_DB = 6.0
# Squares that are added up in float32; these sums are added in float64.
_SUMMED = 512
# Far above what squares that float32 cannot hold could add.
_LEAST_ENERGY = 1e-20


@dataclass(frozen=True, slots=True)
class ModuleProof:
    """One quantized weight, measured.

    Attributes:
        module: Whose weight.
        graphs: Which graphs read it.
        weight: How it is rounded.
        activations: Graph -> how the module's input is rounded; graphs that leave it float are left out.
        snr_db: Signal to noise of the dequantized weight against its source, in decibels; None where it is exact.
        largest_error: Largest absolute difference.
        scale_range: Smallest, median and largest scale.
        parameters: Weights of the matrix.
        nbytes: What it takes in the file, scales included.
    """

    module: str
    graphs: tuple[GraphName, ...]
    weight: Mapping[str, Any]
    activations: Mapping[str, Mapping[str, Any]]
    snr_db: float | None
    largest_error: float
    scale_range: tuple[float, float, float]
    parameters: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightProof:
    """What was quantized, and what was not.

    Attributes:
        modules: Every quantized weight.
        left: Graph -> module or tensor -> why it is float.
        input_scales: Graph -> what is rounded -> its scale, 1 where each token has its own.
    """

    modules: tuple[ModuleProof, ...]
    left: Mapping[GraphName, Mapping[str, str]]
    input_scales: Mapping[GraphName, Mapping[str, float]]

    @property
    def worst(self) -> ModuleProof | None:
        """The module with the least signal to noise; None where only the cache is quantized."""
        return min(
            self.modules,
            key=lambda proof: math.inf if proof.snr_db is None else proof.snr_db,
            default=None,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        worst = self.worst
        named = (
            None
            if worst is None
            else {"module": worst.module, "graphs": worst.graphs, "snr_db": worst.snr_db}
        )
        return {"worst_module": named, **asdict(self)}


def prove_weights(
    bundle: Bundle,
    source: FloatWeights,
    choices: Mapping[GraphName, GraphChoice],
    jobs: Iterable[TensorJob],
) -> WeightProof:
    """Read a quantized bundle back and compare it with the float one.

    Args:
        bundle: The quantized bundle.
        source: Weights of the float bundle.
        choices: What was to be done to each graph.
        jobs: What was to be written.

    Raises:
        RuntimeError: A weight or a scale is not what it has to be; nothing of such a bundle should be used.
    """
    models = {graph: ir.load(bundle.graph_path(graph)) for graph in choices}
    found = {graph: find_dequantized(model) for graph, model in models.items()}
    scales = {graph: input_scales(model) for graph, model in models.items()}
    for graph, by_value in scales.items():
        for value, scale in by_value.items():
            if not (math.isfinite(scale) and scale > 0):
                raise RuntimeError(f"{graph}: the scale of {value!r} is {scale}, expected a positive number")
    proofs = []
    with BundleWeights(bundle) as written:
        for model in models.values():
            check_places(model, written)
        for job in jobs:
            if job.stored is not None:
                _check_nodes(job, job.stored, choices, found)
                weight = found[job.graphs[0]][job.name]
                proofs.append(_prove(job, job.stored, weight, written, source, choices))
    return WeightProof(tuple(proofs), {graph: dict(choice.left) for graph, choice in choices.items()}, scales)


def _check_nodes(
    job: TensorJob,
    stored: StoredWeight,
    choices: Mapping[GraphName, GraphChoice],
    found: Mapping[GraphName, Mapping[str, DequantizedWeight]],
) -> None:
    """Every graph that should reads the weight dequantized, with its input rounded or not as it should."""
    for graph in job.graphs:
        weight, scheme = found[graph].get(job.name), choices[graph].schemes[stored.linear]
        if weight is None or not weight.readers:
            raise RuntimeError(f"{graph}: {job.name} was to be quantized, the graph does not read it so")
        if weight.rounds_inputs != (scheme.activation is not None):
            raise RuntimeError(f"{graph}: the input of {stored.linear.module} is not rounded as asked for")


def _prove(
    job: TensorJob,
    stored: StoredWeight,
    weight: DequantizedWeight,
    written: BundleWeights,
    source: FloatWeights,
    choices: Mapping[GraphName, GraphChoice],
) -> ModuleProof:
    def measure(rows: tuple[int, int]) -> tuple[float, float, float]:
        exact = _exact_rows(job, stored, weight, source, *rows)
        if (found := compare_compiled(exact, written, weight, *rows)) is not None:
            return found
        exact, rounded = as_float32(exact), read_rows(written, weight, *rows)
        error = np.subtract(rounded, exact, out=rounded)
        return _energy(exact), _energy(error), max(float(error.max()), -float(error.min()))

    signal = noise = largest = 0.0
    ready = job.plan.ready_weights is not None
    # What a checkpoint holds quantized is read one at a time.
    ranges = _row_ranges(stored, weight, PART_WEIGHTS if ready else BAND_WEIGHTS)
    for energy, lost, furthest in (map if ready else map_in_order)(measure, ranges):
        signal, noise, largest = signal + energy, noise + lost, max(largest, furthest)
    snr = _decibels(signal, noise)
    if ready and snr is not None:
        raise RuntimeError(
            f"{job.name}: read back, it differs from the checkpoint's by up to {largest:g}, expected 0"
        )
    if snr is not None and snr < _LEAST_SNR_DB:
        raise RuntimeError(
            f"{job.name}: read back, its signal to noise is {snr} dB, expected at least {_LEAST_SNR_DB}; "
            "the recipe is too coarse for this weight, or it was not written right"
        )
    activations = {graph: choices[graph].schemes[stored.linear].activation for graph in job.graphs}
    return ModuleProof(
        module=stored.linear.module,
        graphs=job.graphs,
        weight=asdict(stored.scheme),
        activations={graph: asdict(scheme) for graph, scheme in activations.items() if scheme is not None},
        snr_db=None if snr is None else round(snr, 3),
        largest_error=largest,
        scale_range=_scale_range(written, weight),
        parameters=math.prod(stored.linear.shape),
        nbytes=sum(written.tensors[spec.name].size for spec in stored.tensors),
    )


def _row_ranges(stored: StoredWeight, weight: DequantizedWeight, most: int) -> Iterator[tuple[int, int]]:
    """Which rows (of experts: matrices) of a weight are compared at a time, about `most` weights."""
    rows, *rest = stored.linear.shape
    # Twice the block: a part of 4-bit values then begins with a byte, whatever the columns. Experts do so anyway.
    unit = 1 if stored.linear.kind == "experts" else 2 * (weight.block_size or 1)
    step = max(unit, most // math.prod(rest) // unit * unit)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _exact_rows(
    job: TensorJob,
    stored: StoredWeight,
    weight: DequantizedWeight,
    source: FloatWeights,
    start: int,
    stop: int,
) -> NDArray[np.generic]:
    """Rows of the source (of experts: matrices) in its type; rescaled ones in float32."""
    if weight.input_order is None:
        exact = source.read(job.source, start, stop)
    else:
        exact = source.read(job.source)[weight.input_order[start:stop]]
    return exact if job.rescaling is None else _rescaled(as_float32(exact), stored, job.rescaling, start)


def _energy(values: Floats) -> float:
    """The sum of squares; float32 does for a few at a time, unless they leave its range."""
    flat = values.reshape(-1)
    whole = flat[: len(flat) // _SUMMED * _SUMMED].reshape(-1, _SUMMED)
    with np.errstate(over="ignore"):
        energy = float(np.einsum("ij,ij->i", whole, whole).sum(dtype=np.float64))
    if not _LEAST_ENERGY < energy < math.inf:
        return float(np.square(flat, dtype=np.float64).sum())
    return energy + float(np.square(flat[whole.size :], dtype=np.float64).sum())


def _rescaled(rows: Floats, stored: StoredWeight, rescaling: Rescaling, start: int) -> Floats:
    part, everything = slice(start, start + len(rows)), slice(None)
    if stored.linear.kind == "table":
        return rescale(rows.T, rescaling, everything, part).T
    return rescale(rows, rescaling, part if stored.linear.kind == "matmul" else everything, everything)


def _decibels(signal: float, noise: float) -> float | None:
    """Signal to noise; None where there is no noise."""
    if noise == 0:
        return None
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf


def _scale_range(written: BundleWeights, weight: DequantizedWeight) -> tuple[float, float, float]:
    """Smallest, median and largest scale.

    Raises:
        RuntimeError: One is not a positive number.
    """
    scales = as_float32(written.read(weight.scale))
    if weight.global_scale is not None:
        scales = scales * as_float32(written.read(weight.global_scale))
    least, most = float(scales.min()), float(scales.max())
    if not (math.isfinite(most) and least > 0):
        raise RuntimeError(
            f"{weight.scale}: scales from {least:g} to {most:g}, expected positive numbers; not a usable bundle"
        )
    return least, float(np.median(scales)), most
