"""The command line: `kvgraph COMMAND ...`, one command per stage.

A command is a module of `kvgraph.commands` with `NAME`, `HELP`, `add_arguments` and `run`. Only the chosen
one is imported, so that `kvgraph --help` needs none of the packages that the commands need.

Exit codes: 0 done, 1 a comparison is out of its band, 2 bad input or environment (one line on stderr).
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol, cast

from kvgraph import __version__

# Name and the line that `kvgraph --help` shows; written out here because importing a command may be slow.
COMMANDS = {
    "export": "turn a checkpoint into a bundle: two ONNX graphs, their weights and a tokenizer",
    "quantize": "quantize a bundle to INT8, FP8 and below, and measure what it costs",
    "build": "compile a bundle for a target: ONNX Runtime, TensorRT, TensorRT-RTX",
    "run": "generate text from a bundle",
    "compare": "compare a bundle with its checkpoint, or with another bundle, step by step",
    "perplexity": "measure the perplexity of a text",
    "inspect": "show what a checkpoint or a bundle holds: parameters, cache, operators, files",
    "bench": "measure prefill and decode speed, memory and load time",
}

_DESCRIPTION = "A static-graph compiler for Transformer language models: explicit prefill and decode graphs."

DONE, BAD_INPUT = 0, 2
# As a shell reports a process ended by SIGINT and by SIGPIPE.
INTERRUPTED, OUTPUT_CLOSED = 130, 141

# What to install for a package that only some commands need: an extra of pyproject.toml.
_EXTRAS = {
    "cuda": "kvgraph[rtx] or kvgraph[tensorrt]",
    "huggingface_hub": "kvgraph[export]",
    "matplotlib": "kvgraph[export]",
    "ml_dtypes": "kvgraph[export]",
    "onnx": "kvgraph[export]",
    "onnx_ir": "kvgraph[export]",
    "onnxruntime": "kvgraph[cpu] or kvgraph[gpu]",
    "onnxscript": "kvgraph[export]",
    "safetensors": "kvgraph[export]",
    "tensorrt": "kvgraph[tensorrt]",
    "tensorrt_rtx_bindings": "kvgraph[rtx]",
    "torch": "kvgraph[export]",
}


class Command(Protocol):
    """What a module of `kvgraph.commands` offers.

    Attributes:
        NAME: The word on the command line, and the module's name.
        HELP: What `kvgraph NAME --help` says that it does.
    """

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the flags of the command."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do the work and give the exit code."""
        ...


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, as all errors of the command line are."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"kvgraph: error: {message}; see `{self.prog} --help`\n")


class _Version(argparse.Action):
    """Prints the version; what kernels there are is looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *arguments: object) -> None:
        print(f"kvgraph {__version__} (CPU kernels: {_cpu_kernels()})")
        parser.exit()


def _cpu_kernels() -> str:
    """Instruction set of the operators of the ort-cpu target, or why there are none."""
    from kvgraph.runtime.kernels import instruction_set

    try:
        return instruction_set() or "none, no C++ compiler at installation"
    except OSError as error:  # a library of another machine
        return f"none, {error}"


def load_command(name: str) -> Command:
    """The module of a command in `COMMANDS`."""
    return cast("Command", importlib.import_module(f"kvgraph.commands.{name}"))


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, with the flags of the command `chosen` alone."""
    parser = _Parser(prog="kvgraph", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, help="show the version, and which CPU kernels it has")
    debug_help = "show the traceback of an error"
    parser.add_argument("--debug", action="store_true", help=debug_help)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = subparsers.add_parser(name, help=summary, allow_abbrev=False)
        # Without a default of its own, so that it does not undo a --debug before the command.
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug_help)
        if name == chosen:
            module = load_command(name)
            command.description = module.HELP
            module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code.

    Args:
        argv: Arguments after the program's name; default: those of the process.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        with _terminated_as_interrupted():
            code = _dispatch(arguments)
        sys.stdout.flush()  # here, where a closed pipe is still handled, and not at the interpreter's exit
    except BrokenPipeError:
        _discard_output()
        return OUTPUT_CLOSED
    except KeyboardInterrupt:
        print("kvgraph: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"kvgraph: error: {describe(error)}", file=sys.stderr)
        return BAD_INPUT
    return code


def describe(error: Exception) -> str:
    """One line that tells a user what went wrong."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = error.name.partition(".")[0]
        if package in _EXTRAS:
            text = f"{package} is not installed; install {_EXTRAS[package]}"
    return " ".join(text.split()) or type(error).__name__


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """What a terminated command has half written is removed as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dispatch(arguments: list[str]) -> int:
    # The flags before the command take no value, so the first word without a dash is the command.
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        args = build_parser(chosen).parse_args(arguments)
    except SystemExit as stop:  # argparse's way out of --help, --version and its errors
        return stop.code if isinstance(stop.code, int) else DONE
    return load_command(args.command).run(args)


def _discard_output() -> None:
    # What is still buffered would raise once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
