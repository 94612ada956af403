"""Compares kvgraph with other engines on the same weights, tokens and machine: `python tests/bench/peers.py`.

It makes random checkpoints, installs every peer in a virtual environment of its own, converts the checkpoint for each,
and measures all of them in turns, one process at a time, in several rounds. Everything is kept in one folder, and what
is there already is not made anew: remove a part of it to repeat that part.

    WORK/env/ENGINE           virtual environments
    WORK/SHAPE/checkpoint     random weights
    WORK/SHAPE/models/ROW     what each conversion wrote, and its time and memory
    WORK/SHAPE/results        one JSON file a configuration, round and context

Needs tens of gigabytes of disk, a C++ compiler for llama.cpp, and an hour for both shapes.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import peer_table
from peer_environment import environment_variables, python_of, run_measured
from peer_rows import ROWS, SHAPES, Row

_HERE = Path(__file__).parent
_TINY_MODEL = _HERE.parent / "tiny_model" / "model"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# A child that takes longer has hung.
_TIMEOUT_S = 1800


def make_checkpoint(directory: Path, shape: dict[str, int], seed: int) -> None:
    """Random weights, and a tokenizer so that every converter takes the directory; only ids are compared."""
    options = [word for name, value in shape.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    script = str(_HERE / "make_checkpoint.py")
    subprocess.run([sys.executable, script, str(directory), "--seed", str(seed), *options], check=True)
    for name in _TOKENIZER:
        shutil.copy(_TINY_MODEL / name, directory / name)
    # The last id ends a text, which prompts do not hold and random weights hardly ever choose.
    generation = {"bos_token_id": 1, "eos_token_id": shape["vocab_size"] - 1}
    (directory / "generation_config.json").write_text(json.dumps(generation))


def directory_name(row: Row) -> str:
    """The name of a row as a directory: "kvgraph int8-dynamic, int4-wo" is kvgraph-int8-dynamic-int4-wo."""
    return re.sub(r"[^\w.]+", "-", row.name)


def record_of(model: Path) -> Path:
    """The file that says what a conversion took; a name such as llama.cpp-Q4_0 has no suffix to replace."""
    return model.with_name(model.name + ".json")


class Comparison:
    """One shape at one context: the paths, and the commands."""

    def __init__(self, args: argparse.Namespace, shape: str) -> None:
        self._args = args
        self._shape = SHAPES[shape]
        self._folder = args.work.resolve() / shape
        self._results = self._folder / "results"
        self._results.mkdir(parents=True, exist_ok=True)
        self._prefix = shlex.split(args.timed_with)
        self.rows = [row for row in ROWS if not args.only or any(part in row.name for part in args.only)]
        self.failures: dict[str, str] = {}

    def prepare(self) -> dict[str, peer_table.Conversion]:
        """Make the checkpoint, and convert it for every row; a row that fails is left out, and says why."""
        checkpoint = self._folder / "checkpoint"
        if not (checkpoint / "generation_config.json").exists():
            shutil.rmtree(checkpoint, ignore_errors=True)
            make_checkpoint(checkpoint, self._shape, self._args.seed)
        conversions = {}
        for row in self.rows:
            done = record_of(self._model(row))
            try:
                if not done.exists():
                    self._convert(row, checkpoint, done)
                conversions[row.name] = peer_table.Conversion(**json.loads(done.read_text()))
            except subprocess.CalledProcessError as error:
                self._fail(row, error)
        return conversions

    def measure(self) -> tuple[dict[str, peer_table.Speed], peer_table.Rates]:
        """Every row in every round, and the machine itself at the start of each."""
        speeds: dict[str, list[dict[str, object]]] = {}
        rates = []
        for number in range(self._args.rounds):
            file = self._results / f"rates-{number}.json"
            options = ["--threads", str(self._args.threads), "--json", str(file)]
            self._run([sys.executable, str(_HERE / "peer_rates.py"), *options])
            rates.append(json.loads(file.read_text()))
            for row in [row for row in self.rows if row.name not in self.failures]:
                try:
                    speeds.setdefault(row.name, []).append(self._measure(row, number))
                except subprocess.CalledProcessError as error:
                    self._fail(row, error)
        measured = {name: peer_table.median_speed(rounds) for name, rounds in speeds.items() if rounds}
        return measured, peer_table.median_rates(rates)

    def _model(self, row: Row) -> Path:
        return self._folder / "models" / directory_name(row)

    def _convert(self, row: Row, checkpoint: Path, done: Path) -> None:
        model = self._model(row)
        shutil.rmtree(model, ignore_errors=True)
        model.parent.mkdir(parents=True, exist_ok=True)
        options = ["--convert", str(checkpoint), "--model", str(model), "--precision", row.precision]
        measured = self._run(self._child(row, options))
        done.write_text(json.dumps(measured))

    def _measure(self, row: Row, number: int) -> dict[str, object]:
        file = self._results / f"{directory_name(row)}-{self._args.context}-{number}.json"
        file.unlink(missing_ok=True)
        sizes = {"prompt": self._args.context, "new": self._args.new_tokens}
        options = [
            "--model",
            str(self._model(row)),
            "--threads",
            str(self._args.threads),
            "--json",
            str(file),
        ]
        for name, tokens in sizes.items():
            options += [f"--{name}-tokens", str(tokens)]
        self._run(self._child(row, options))
        return json.loads(file.read_text())

    def _child(self, row: Row, options: list[str]) -> list[str]:
        python = python_of(self._args.work.resolve() / "env", row.engine)
        return [str(python), str(_HERE / f"peer_{row.engine}.py"), *options]

    def _run(self, command: list[str]) -> dict[str, float]:
        variables = environment_variables(self._args.threads)
        return run_measured([*self._prefix, *command], variables, self._folder / "log.txt", _TIMEOUT_S)

    def _fail(self, row: Row, error: subprocess.CalledProcessError) -> None:
        self.failures[row.name] = str(error.stderr).replace("|", "/")
        print(f"{row.name}: {self.failures[row.name]}", file=sys.stderr)


def main() -> None:
    """Parse the arguments, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--work", type=Path, default=Path("out/peers"), help="folder that keeps everything")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="one of them (default: all)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="rows with this in their name")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=32, metavar="N", help="decode steps behind it")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights")
    parser.add_argument(
        "--timed-with",
        default="",
        metavar="COMMAND",
        help='put before every measured process: "taskset -c 0,1"',
    )
    args = parser.parse_args()
    for shape in args.shape or SHAPES:
        comparison = Comparison(args, shape)
        conversions = comparison.prepare()
        speeds, rates = comparison.measure()
        print(f"\n{shape}, {args.context} tokens in the prompt and {args.new_tokens} steps behind it")
        print(peer_table.rates_line(rates, args.threads), end="\n\n")
        print(
            peer_table.speed_table(
                comparison.rows,
                speeds,
                conversions,
                comparison.failures,
                rates,
                SHAPES[shape],
                args.context,
            )
        )
        print("\n" + peer_table.ratio_table(comparison.rows, speeds))


if __name__ == "__main__":
    main()
