"""Measures the memory that `kvgraph quantize` takes: `python quantize_memory.py [--num-hidden-layers N]`.

A random bfloat16 checkpoint of the 1B shape, with all its 16 layers or fewer, is written, exported, and quantized to
int4-wo by rounding to nearest and by GPTQ on a few samples of random tokens, every time in a process of its own. Memory
is what its peak adds to an interpreter with everything imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Most bytes that quantizing a 1B shape may take.
LIMITS = {"rtn": 1.5e9, "gptq": 3.0e9}

# Runs in a fresh process: argument 1 is the bundle, 2 the output, 3 the algorithm, 4 a file of token ids.
QUANTIZE = """
import json, sys, time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

def peak_bytes():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024

import onnx, onnxruntime
from kvgraph.export.bundle import Bundle
from kvgraph.quant.bundle_weights import BundleWeights
from kvgraph.quant.calibrated_plan import calibrate_plan
from kvgraph.quant.calibration_data import CalibrationOptions, read_calibration
from kvgraph.quant.layerwise import LayerwiseModel
from kvgraph.quant.plan import GraphPlan, QuantizationPlan, needs_calibration
from kvgraph.quant.quantizer import quantize_bundle
from kvgraph.quant.recipe import load_recipe

before, start = peak_bytes(), time.perf_counter()
graph = GraphPlan(replace(load_recipe("int4-wo"), algorithm=sys.argv[3]))
plan, bundle, output = QuantizationPlan(graph, graph), Bundle.open(sys.argv[1]), Path(sys.argv[2])
with ExitStack() as stack:
    if needs_calibration(graph.recipe):
        data = read_calibration(sys.argv[4], bundle, CalibrationOptions())
        model = LayerwiseModel(bundle, stack.enter_context(BundleWeights(bundle)), data)
        plan = calibrate_plan(model, plan, output.parent / "statistics")
    quantize_bundle(bundle, plan, output)
result = {"memory_bytes": peak_bytes() - before, "time_s": time.perf_counter() - start}
print(json.dumps({**result, "cpu_s": time.process_time()}))
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """What quantizing a bundle took: the peak of memory above the imports, and seconds."""

    memory_bytes: float
    time_s: float
    cpu_s: float

    def __str__(self) -> str:
        return f"{self.memory_bytes / 1e9:.2f} GB, {self.time_s:.0f} s ({self.cpu_s:.0f} s of CPU)"


def quantize(bundle: Path, output: Path, algorithm: str, tokens: Path) -> Cost:
    """Quantize a bundle to int4-wo in a process of its own."""
    command = [sys.executable, "-c", QUANTIZE, str(bundle), str(output), algorithm, str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def prepare(folder: Path, arguments: list[str]) -> Path:
    """A bundle of a random checkpoint that `make_checkpoint.py` writes with these arguments."""
    maker = Path(__file__).with_name("make_checkpoint.py")
    checkpoint, bundle = folder / "checkpoint", folder / "bundle"
    subprocess.run([sys.executable, str(maker), str(checkpoint), *arguments], check=True)
    command = [sys.executable, "-m", "kvgraph", "export", str(checkpoint), "-o", str(bundle)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return bundle


def write_tokens(path: Path, vocab_size: int, samples: int, length: int) -> None:
    """Random token ids [samples, length]."""
    random = np.random.default_rng(0)
    np.save(path, random.integers(0, vocab_size, (samples, length)))


def main() -> int:
    """Parse the arguments and measure; 1 where a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--bundle", type=Path, help="a float bundle to quantize (default: make one)")
    parser.add_argument("--num-hidden-layers", type=int, default=16, metavar="N")
    parser.add_argument("--algorithms", nargs="+", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--samples", type=int, default=4, metavar="N", help="sequences for GPTQ (4)")
    parser.add_argument("--sequence-length", type=int, default=128, metavar="N")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    exceeded = False
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder, tokens = Path(temporary), Path(temporary) / "tokens.npy"
        bundle = args.bundle or prepare(folder, ["--num-hidden-layers", str(args.num_hidden_layers)])
        vocab_size = json.loads((bundle / "bundle.json").read_text())["config"]["vocab_size"]
        write_tokens(tokens, vocab_size, args.samples, args.sequence_length)
        for algorithm in args.algorithms:
            cost = quantize(bundle, folder / algorithm, algorithm, tokens)
            over = cost.memory_bytes > LIMITS[algorithm]
            exceeded |= over
            verdict = "over" if over else "below"
            print(f"int4-wo, {algorithm}: {cost}; {verdict} {LIMITS[algorithm] / 1e9:.1f} GB", flush=True)
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
