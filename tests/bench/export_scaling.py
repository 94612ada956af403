"""Measures what `kvgraph export` costs: `python export_scaling.py [--checkpoint DIRECTORY]`.

First by the number of layers, from a config alone: the shape of Llama-3-70B with 2 and with 80 layers. Then, where a
checkpoint is given (`make_checkpoint.py` writes one of the 1B shape), with its weights, beside a plain copy of the same
files to the same disk. Every export runs in a process of its own; memory is what its peak adds to an interpreter that
has imported torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LLAMA_3_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}

# Runs in a fresh process: argument 1 is the checkpoint, 2 the output, 3 "weights" or "graphs".
EXPORT = """
import json, sys, time
import torch

def peak_bytes():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) * 1024

before = peak_bytes()
from kvgraph.export import exporter
from kvgraph.models.checkpoint import open_checkpoint

def timed(*arguments):
    start = time.perf_counter()
    digest = write_weights(*arguments)
    result["weights_s"] = time.perf_counter() - start
    return digest

result, write_weights = {}, exporter.write_weights
exporter.write_weights = timed
start = time.perf_counter()
options = exporter.ExportOptions(weights=sys.argv[3] == "weights")
exporter.export_checkpoint(open_checkpoint(sys.argv[1]), sys.argv[2], options)
result["time_s"] = time.perf_counter() - start
result["cpu_s"] = time.process_time()
result["memory_bytes"] = peak_bytes() - before
print(json.dumps(result))
"""


def export(checkpoint: Path, output: Path, part: str) -> dict[str, float]:
    """Seconds and bytes of an export; `part` is "weights" or "graphs"."""
    command = [sys.executable, "-c", EXPORT, str(checkpoint), str(output), part]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def copy(checkpoint: Path, output: Path) -> float:
    """Seconds that a plain copy of the weights takes, until they are on the disk."""
    start = time.perf_counter()
    output.mkdir()
    for file in checkpoint.glob("*.safetensors"):
        shutil.copyfile(file, output / file.name)
        with (output / file.name).open("rb") as copied:
            os.fsync(copied.fileno())
    return time.perf_counter() - start


def measure_layers(folder: Path) -> None:
    """Print time and memory for 2 and 80 layers of the 70B shape."""
    results = {}
    for layers in (2, 80):
        config = folder / f"{layers}.json"
        config.write_text(json.dumps({**LLAMA_3_70B, "num_hidden_layers": layers}))
        results[layers] = export(config, folder / f"graphs-{layers}", "graphs")
        print(f"{layers:3} layers, graphs only: {describe(results[layers])}")
    print(f"ratio of the times: {results[80]['time_s'] / results[2]['time_s']:.2f}")


def measure_weights(checkpoint: Path, folder: Path) -> None:
    """Print time and memory of an export with weights, and the time of a plain copy."""
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    whole = export(checkpoint, folder / "whole", "weights")
    seconds, copied = whole["weights_s"], copy(checkpoint, folder / "copy")
    print(f"{checkpoint.name}, {size / 1e9:.2f} GB: {describe(whole)}")
    print(f"of that the weights: {seconds:.1f} s, {size / seconds / 1e6:.0f} MB/s")
    print(f"a plain copy: {copied:.1f} s, {size / copied / 1e6:.0f} MB/s")


def describe(result: dict[str, float]) -> str:
    """Seconds and megabytes in words; the CPU time, imports included, says more on a busy machine."""
    time_s, cpu_s, memory = result["time_s"], result["cpu_s"], result["memory_bytes"] / 1e6
    return f"{time_s:.1f} s ({cpu_s:.1f} s of CPU), {memory:.0f} MB above an interpreter with torch"


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, help="a directory with weights, to export with them")
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure_layers(Path(folder))
        if args.checkpoint is not None:
            measure_weights(args.checkpoint, Path(folder))


if __name__ == "__main__":
    main()
