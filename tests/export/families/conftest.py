"""What the tests of families share: checkpoints, references, sessions, and the README's table.

`pytest tests/export/families --families-table README.md` writes the table from what the tests record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from family_cases.case import LENGTH, Case
from family_cases.cases import CASES
from family_cases.checkpoints import write_checkpoint
from family_cases.references import ROWS, SOURCE_LENGTHS, Reference, source_ids
from family_cases.table import rows_of, write_table

from kvgraph.export.bundle import Bundle
from kvgraph.export.torch_encoder_session import open_torch_session
from kvgraph.models.checkpoint import open_checkpoint
from kvgraph.models.family import FAMILIES
from kvgraph.runtime.encoder_session import has_encoder
from kvgraph.runtime.open import open_session
from kvgraph.runtime.session import Cache, Session


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--families-table", type=Path, metavar="README", help="write the table of families here")


def pytest_configure(config: pytest.Config) -> None:
    # Workers report to the process that started them.
    readme = config.getoption("--families-table", default=None)
    if readme is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TableWriter(readme), "families-table")


class TableWriter:
    """Gathers what the tests record of families, and writes the table if all of them passed."""

    def __init__(self, readme: Path) -> None:
        self.readme = readme
        self.facts: list[dict[str, Any]] = []
        self.outcome = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.facts += [value for name, value in report.user_properties if name == "family"]

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None]:
        yield
        if exitstatus != pytest.ExitCode.OK:
            self.outcome = f"{self.readme} is as it was: not every test passed"
            return
        try:
            write_table(self.readme, rows_of(self.facts, FAMILIES))
            self.outcome = f"wrote the table of families to {self.readme}"
        except ValueError as error:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
            self.outcome = f"{self.readme} is as it was: {error}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(self.outcome)


@pytest.fixture
def record(case: Case, record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Records what a test found out about a family, see `family_cases.table`."""
    return lambda **facts: record_property("family", {"family": case.family, **facts})


@pytest.fixture
def case(name: str) -> Case:
    """The case of the test's parameter `name`."""
    return CASES[name]


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a case, written once."""

    @functools.cache
    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp(CASES[name].family)
        write_checkpoint(CASES[name], path)
        return path

    return make


@pytest.fixture
def checkpoint(name: str, make_checkpoint: Callable[[str], Path]) -> Path:
    return make_checkpoint(name)


@pytest.fixture(scope="session")
def make_reference(make_checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    return functools.cache(lambda name: Reference(CASES[name], make_checkpoint(name)))


@pytest.fixture
def right(name: str, make_reference: Callable[[str], Reference]) -> Reference:
    """What the case's logits and caches are."""
    return make_reference(name)


@pytest.fixture
def bundle(checkpoint: Path, exported: Callable[..., Bundle]) -> Bundle:
    """The case's canonical graphs in float32."""
    return exported(checkpoint, dtype="float32")


@pytest.fixture(scope="session")
def open_torch() -> Callable[..., Session]:
    """A checkpoint in eager torch."""
    return functools.lru_cache(maxsize=4)(lambda path: open_torch_session(open_checkpoint(path)))


@pytest.fixture(scope="session")
def open_canonical() -> Callable[[Path], Session]:
    """A bundle's own graphs under ONNX Runtime."""
    return functools.cache(lambda path: open_session(Bundle.open(path), threads=1))


@pytest.fixture
def new_cache(case: Case) -> Callable[[Session], Cache]:
    """A cache of `ROWS` rows; in a model with an encoder, each reads a source of its own."""

    def allocate(session: Session) -> Cache:
        cache = session.allocate_cache(ROWS, LENGTH)
        if has_encoder(session):
            session.attach(cache, session.encode(source_ids(case), SOURCE_LENGTHS))
        return cache

    return allocate
