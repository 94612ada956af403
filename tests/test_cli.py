"""The command line: what it prints, where, with which exit code, and what it does not import."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from kvgraph import cli
from kvgraph.quant.plan import needs_calibration
from kvgraph.quant.recipe import load_recipe
from kvgraph.quant.recipe_files import recipe_names
from kvgraph.runtime.kernels import instruction_set

HEAVY = ("onnx", "onnxruntime", "tokenizers", "torch", "transformers")

Run = Callable[[argparse.Namespace], int]
AddCommand = Callable[[Run], None]


@pytest.fixture
def add_probe(monkeypatch: pytest.MonkeyPatch) -> AddCommand:
    """Adds a command `probe` that does what the test says."""

    def add(run: Run) -> None:
        module = ModuleType("kvgraph.commands.probe")
        vars(module).update(
            NAME="probe",
            HELP="Test the command line.",
            add_arguments=lambda parser: parser.add_argument("--level", type=int, default=0),
            run=run,
        )
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "probe", "test the command line")

    return add


def failing(error: BaseException) -> Run:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize("code", [0, 1, 2])
def test_exit_code_is_the_commands(code: int, add_probe: AddCommand) -> None:
    add_probe(lambda args: code)

    assert cli.main(["probe"]) == code


def test_command_gets_its_own_flags(add_probe: AddCommand) -> None:
    add_probe(lambda args: args.level)

    assert cli.main(["probe", "--level", "1"]) == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("vocab_size is 0;\n  expected at least 1"), "vocab_size is 0; expected at least 1"),
        (TypeError("input_ids is float32"), "input_ids is float32"),
        (RuntimeError("no such provider"), "no such provider"),
        (
            FileNotFoundError(2, "No such file or directory", "a b.json"),
            "a b.json: No such file or directory",
        ),
        (OSError("disk is full"), "disk is full"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "torch is not installed; install kvgraph[export]",
        ),
        (ModuleNotFoundError("No module named 'x'", name="x"), "No module named 'x'"),
        (ValueError(), "ValueError"),
    ],
)
def test_error_is_one_line_and_exit_code_two(
    error: Exception, line: str, add_probe: AddCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    add_probe(failing(error))

    assert cli.main(["probe"]) == 2

    assert capsys.readouterr() == ("", f"kvgraph: error: {line}\n")


@pytest.mark.parametrize("arguments", [["--debug", "probe"], ["probe", "--debug"]])
def test_debug_shows_the_traceback(
    arguments: list[str], add_probe: AddCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    add_probe(failing(ValueError("wrong")))

    assert cli.main(arguments) == 2

    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "kvgraph: error: wrong"


def test_fault_of_kvgraph_itself_is_not_reported_as_the_users(add_probe: AddCommand) -> None:
    add_probe(failing(KeyError("layer")))

    with pytest.raises(KeyError):
        cli.main(["probe"])


def test_interrupt_gives_130(add_probe: AddCommand, capsys: pytest.CaptureFixture[str]) -> None:
    add_probe(failing(KeyboardInterrupt()))

    assert cli.main(["probe"]) == 130

    assert capsys.readouterr().err == "kvgraph: interrupted\n"


def test_termination_is_an_interrupt(add_probe: AddCommand, capsys: pytest.CaptureFixture[str]) -> None:
    """A scheduler that stops a command leaves as little behind as Ctrl-C."""
    before = signal.getsignal(signal.SIGTERM)
    add_probe(lambda args: signal.raise_signal(signal.SIGTERM))

    assert cli.main(["probe"]) == 130

    assert capsys.readouterr().err == "kvgraph: interrupted\n"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "required: COMMAND"),
        (["exprot"], "'exprot' (choose from "),
        (["probe", "--level", "high"], "invalid int value: 'high'; see `kvgraph probe --help`"),
        (["probe", "--lev", "1"], "unrecognized arguments: --lev 1"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(
    arguments: list[str], part: str, add_probe: AddCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    add_probe(lambda args: 0)

    assert cli.main(arguments) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"kvgraph: error: .*\n", err)
    assert part in err


def broken(path: str) -> object:
    raise OSError("wrong ELF class")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, instruction_set() or "none, no C++ compiler at installation"),
        ({"library_path": lambda: None}, "none, no C++ compiler at installation"),
        ({"library_path": lambda: Path("x.so"), "ctypes.CDLL": broken}, "none, wrong ELF class"),
    ],
    ids=["here", "without a compiler", "broken"],
)
def test_version_is_that_of_the_package_with_its_kernels(
    changes: dict[str, object],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(f"kvgraph.runtime.kernels.{name}", value)
    assert cli.main(["--version"]) == 0

    version = importlib.metadata.version("kvgraph")
    assert capsys.readouterr().out == f"kvgraph {version} (CPU kernels: {expected})\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0

    out = capsys.readouterr().out
    assert [name for name in cli.COMMANDS if not re.search(rf"^ +{name}\b", out, re.MULTILINE)] == []


def test_every_command_module_is_listed_under_its_own_name(repository: Path) -> None:
    modules = {path.stem for path in (repository / "kvgraph" / "commands").glob("[!_]*.py")}

    assert modules == set(cli.COMMANDS)
    assert [cli.load_command(name).NAME for name in cli.COMMANDS] == list(cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_says_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0

    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith(f"usage: kvgraph {name} ")
    assert " ".join(cli.load_command(name).HELP.split()) in out


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_writes_what_is_to_be_given_in_capitals(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    arguments = capsys.readouterr().out.partition("positional arguments:\n")[2].split()
    assert arguments[0].split("|")[0] in ("BUNDLE", "CHECKPOINT")


def test_help_lists_the_recipes_that_a_command_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So wide that no name is broken at its dash.
    monkeypatch.setenv("COLUMNS", "1000")
    calibrated = {name for name in recipe_names() if needs_calibration(load_recipe(name))}
    for command, expected in (("quantize", recipe_names()), ("export", {*recipe_names()} - calibrated)):
        assert cli.main([command, "--help"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        listed = re.findall(r"Names: (.*?) --(?!calibration)", text)[0]
        plain, _, with_data = listed.partition("; with --calibration ")
        assert {*plain.split(", ")} == {*recipe_names()} - calibrated
        assert {*plain.split(", "), *filter(None, with_data.split(", "))} == {*expected}


def test_help_imports_no_command_and_nothing_heavy() -> None:
    loaded = run_python(
        "import sys; from kvgraph.cli import main; main(['--help']); "
        f"print([name for name in sys.modules if name in {HEAVY} or name.startswith('kvgraph.commands.')])"
    )

    assert loaded.splitlines()[-1] == "[]"


def test_version_imports_nothing_heavy() -> None:
    loaded = run_python(
        "import sys; from kvgraph.cli import main; main(['--version']); "
        f"print([name for name in sys.modules if name in {(*HEAVY, 'numpy')}])"
    )

    assert loaded.splitlines()[-1] == "[]"


def test_help_of_every_command_imports_nothing_heavy() -> None:
    loaded = run_python(
        "import sys; from kvgraph.cli import COMMANDS, main; "
        "assert [main([name, '--help']) for name in COMMANDS] == [0] * len(COMMANDS); "
        f"print([name for name in sys.modules if name in {HEAVY}])"
    )

    assert loaded.splitlines()[-1] == "[]"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE")
@pytest.mark.parametrize("flags", [["-u"], []], ids=["unbuffered", "buffered"])
def test_closed_output_ends_quietly(flags: list[str]) -> None:
    printing = (
        "import sys; from kvgraph import cli; "
        "cli._dispatch = lambda arguments: print('token') or 0; "
        "sys.exit(cli.main([]))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, *flags, "-c", printing],
            stdout=closed,
            stderr=subprocess.PIPE,
            env=environment,
            check=False,
        )

    assert (done.returncode, done.stderr) == (141, b"")


def test_missing_package_hint_names_an_extra_that_exists(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    named = {extra for text in cli._EXTRAS.values() for extra in re.findall(r"kvgraph\[(\w+)\]", text)}

    assert named <= set(project["optional-dependencies"])
