"""Directories that are complete or absent: killed, refused, raced and interrupted writers."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgraph.export.writer import writing_directory

MARKER = "bundle.json"

# Fills a directory, stops where it is told to, and reports that on stdout.
WRITER = """
import os, sys, time
from pathlib import Path
from kvgraph.export import writer

destination, stop, force = sys.argv[1], sys.argv[2], sys.argv[3] == "force"

def wait(where):
    if where == stop:
        print("stopped", flush=True)
        time.sleep(60)

sync, rename, unlink = writer._sync_tree, Path.rename, Path.unlink
writer._sync_tree = lambda path: (wait("before sync"), sync(path), wait("after sync"))
Path.rename = lambda self, target: (rename(self, target), wait(f"after rename to {Path(target).name}"))
with writer.writing_directory(destination, "bundle.json", force) as directory:
    wait("empty")
    (directory / "weights").write_bytes(b"new" * 1000)
    wait("half")
    (directory / "bundle.json").write_text("new")
"""


def start_writer(destination: Path, stop: str, force: bool = False) -> subprocess.Popen[str]:
    """A process that stands still in the middle of writing `destination`."""
    command = [sys.executable, "-c", WRITER, str(destination), stop, "force" if force else ""]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopped\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def write(destination: Path, force: bool = False, content: str = "whole") -> None:
    with writing_directory(destination, MARKER, force) as directory:
        (directory / MARKER).write_text(content)


def write_half(destination: Path, error: BaseException) -> None:
    with writing_directory(destination, MARKER, True) as directory:
        (directory / MARKER).write_text("half")
        raise error


def write_during(destination: Path, force: bool) -> None:
    """Write `destination` and, in the middle of it, do the same once more from start to end."""
    with writing_directory(destination, MARKER, force) as directory:
        (directory / MARKER).write_text("slow")
        write(destination, force, "quick")


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_finished_directory_holds_what_was_written_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [MARKER]


def test_finished_directory_has_the_permissions_of_a_new_one(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    write(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_missing_parents_are_made(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "out")
    assert names(tmp_path / "a" / "b" / "out") == [MARKER]


def test_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_half(tmp_path / "out", KeyboardInterrupt())
    assert names(tmp_path) == []


def test_error_while_replacing_leaves_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "out", content="old")
    with pytest.raises(RuntimeError, match="broken"):
        write_half(tmp_path / "out", RuntimeError("broken"))
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / MARKER).read_text() == "old"


@pytest.mark.parametrize("stop", ["empty", "half", "before sync", "after sync"])
def test_killed_writer_leaves_nothing_that_looks_finished_and_the_next_one_cleans_up(
    tmp_path: Path, stop: str
) -> None:
    kill(start_writer(tmp_path / "out", stop))
    assert not (tmp_path / "out").exists()
    assert len(names(tmp_path)) == 1
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_writer_killed_right_after_the_rename_has_finished(tmp_path: Path) -> None:
    kill(start_writer(tmp_path / "out", "after rename to out"))
    assert (tmp_path / "out" / MARKER).read_text() == "new"
    write(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [MARKER]


@pytest.mark.parametrize(
    ("stop", "remains"), [("half", "old"), ("after sync", "old"), ("after rename to old", None)]
)
def test_killed_replacement_leaves_the_old_directory_or_none(
    tmp_path: Path, stop: str, remains: str | None
) -> None:
    write(tmp_path / "out", content="old")
    kill(start_writer(tmp_path / "out", stop, force=True))
    found = tmp_path / "out" / MARKER
    assert (found.read_text() if found.exists() else None) == remains
    write(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out"]
    assert found.read_text() == "whole"


def test_writer_that_is_alive_keeps_its_temporary(tmp_path: Path) -> None:
    slow = start_writer(tmp_path / "out", "half")
    try:
        write(tmp_path / "other")
        write(tmp_path / "out")
        assert len(names(tmp_path)) == 3
    finally:
        kill(slow)


def test_slower_of_two_writers_fails_and_leaves_the_quick_ones_work(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="exists and is not empty; use --force"):
        write_during(tmp_path / "out", force=False)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / MARKER).read_text() == "quick"


def test_slower_of_two_writers_that_replace_wins(tmp_path: Path) -> None:
    write_during(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / MARKER).read_text() == "slow"


def test_many_processes_at_once_leave_one_whole_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out"), "", "force"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(8)]
    errors = [process.communicate()[1] for process in processes]
    assert errors == [""] * len(processes)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == [MARKER, "weights"]


def test_existing_output_is_kept_without_force(tmp_path: Path) -> None:
    write(tmp_path / "out", content="old")
    with pytest.raises(FileExistsError, match="exists and is not empty; use --force to replace it"):
        write(tmp_path / "out")
    assert (tmp_path / "out" / MARKER).read_text() == "old"


def test_empty_output_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_force_does_not_replace_another_kind_of_directory(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_text("precious")
    with pytest.raises(FileExistsError, match=r"holds no bundle\.json, so --force does not replace it"):
        write(tmp_path / "photos", force=True)
    assert names(tmp_path / "photos") == ["one.jpg"]


@pytest.mark.parametrize("force", [False, True])
def test_working_directory_is_not_replaced_under_our_feet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileExistsError, match="is the working directory; name a new directory"):
        write(Path("."), force=force)
    assert Path.cwd() == tmp_path


def test_file_in_the_place_of_the_output_is_kept(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    with pytest.raises(NotADirectoryError, match="a file is there"):
        write(tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text() == "precious"


def test_output_behind_a_link_is_written_where_the_link_points(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "out").symlink_to("large disk")
    write(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert names(tmp_path / "large disk") == [MARKER]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process, even as root, may not write to."""
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o555)
    if os.geteuid() != 0:
        yield folder
        return
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o011)
    os.seteuid(65534)
    yield folder
    os.seteuid(0)


def test_read_only_folder_is_one_clear_error(read_only: Path) -> None:
    with pytest.raises(PermissionError, match=r"cannot write here; choose another output.*read only'"):
        write(read_only / "out")


def test_full_disk_leaves_nothing_and_says_where(tmp_path: Path, file_limit: int) -> None:
    with pytest.raises(OSError, match=r"make room or choose another output.*out'") as caught:
        write(tmp_path / "out", content="0" * (file_limit + 1))
    assert caught.value.errno == errno.EFBIG
    assert names(tmp_path) == []


def test_name_with_wildcards_is_taken_literally(tmp_path: Path) -> None:
    kill(start_writer(tmp_path / "[a]*", "half"))
    kill(start_writer(tmp_path / "a", "half"))
    write(tmp_path / "[a]*")
    assert [name.partition(".tmp-")[0] for name in names(tmp_path)] == [".a", "[a]*"]


def test_force_does_not_take_along_what_the_marker_does_not_list(tmp_path: Path) -> None:
    output = tmp_path / "out"
    (output / "targets").mkdir(parents=True)
    (output / "marker.json").write_text('{"files": {"graph.onnx": {}}}')
    (output / "graph.onnx").touch()
    notes = output / "notes.txt"
    notes.write_text("mine")

    with (
        pytest.raises(FileExistsError, match=r"holds notes\.txt, which marker\.json does not list"),
        writing_directory(output, "marker.json", True, ["targets"]),
    ):
        pass
    assert notes.read_text() == "mine"

    notes.unlink()
    with writing_directory(output, "marker.json", True, ["targets"]) as directory:
        (directory / "marker.json").write_text("{}")
    assert sorted(path.name for path in output.iterdir()) == ["marker.json"]
