"""Directories that are complete or absent.

A directory is filled under a temporary name beside its destination, synced, and renamed. The temporary holds a locked
file while its writer lives, so that the next writer can tell what a killed one left behind, and remove it.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvgraph.export.bundle import BUNDLE_FILE, Bundle

_LOCK = ".lock"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing_directory(
    destination: str | Path, marker: str, force: bool, subfolders: Collection[str] = ()
) -> Iterator[Path]:
    """A new directory to fill; on leaving it becomes `destination`, on an error it vanishes.

    Args:
        destination: Where the finished directory goes.
        marker: A file that every such directory holds; only a directory that holds it is ever replaced.
        force: Replace what is there.
        subfolders: Folders that such a directory may hold beside the files that its marker lists.

    Raises:
        FileExistsError: Something is there, and `force` is off, it is not of this kind, or somebody else's files are
            among it.
        NotADirectoryError: A file is there.
        OSError: The place is read-only, or full.
    """
    destination = Path(destination).resolve()
    _refuse_existing(destination, marker, force)
    _refuse_foreign(destination, marker, subfolders)
    temporary, lock = _begin(destination)
    with lock:
        try:
            yield temporary
            _sync_tree(temporary)
            with _exclusive(destination.parent):
                _refuse_existing(destination, marker, force)
                _rename(temporary, destination)
        except OSError as error:
            # A failed write does not say where it was.
            if error.errno not in _DISK_FULL or error.filename is not None:
                raise
            advice = f"{error.strerror}; make room or choose another output"
            raise OSError(error.errno, advice, str(destination)) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def refuse_nested(output: str | Path, bundle: Bundle, what: str) -> None:
    """Refuse an output that is the bundle it is made from, or lies in it or around it.

    Args:
        output: Where to write.
        bundle: What is read.
        what: What that is, for the message.

    Raises:
        ValueError: It does.
    """
    ours, theirs = Path(output).resolve(), bundle.path.resolve()
    if ours == theirs:
        raise ValueError(f"{output}: is {what}; choose another output")
    if ours.is_relative_to(theirs) or theirs.is_relative_to(ours):
        where = "inside" if ours.is_relative_to(theirs) else "around"
        raise ValueError(f"{output}: lies {where} {what}, {bundle.path}; choose another output")


def write_description(bundle: Bundle) -> None:
    """Write bundle.json of a bundle into its directory."""
    text = json.dumps(bundle.to_json(), indent=1, ensure_ascii=False)
    (bundle.path / BUNDLE_FILE).write_text(text + "\n", encoding="utf-8")


def _begin(destination: Path) -> tuple[Path, IO[str]]:
    """A new, locked temporary beside `destination`, and its lock; what killed writers left there is removed."""
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(destination.parent):
            _remove_abandoned(destination)
            return _make_locked(destination)
    except OSError as error:
        advice = f"{error.strerror}, cannot write here; choose another output"
        raise OSError(error.errno, advice, str(destination.parent)) from error


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Keep other writers from making, removing or renaming what is in `directory`; held for moments only."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        # Some network file systems lock no directories: there, two writers of one output may meet.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_locked(destination: Path) -> tuple[Path, IO[str]]:
    temporary = destination.with_name(f".{destination.name}.tmp-{secrets.token_hex(4)}")
    temporary.mkdir()
    lock = (temporary / _LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return temporary, lock


def _refuse_existing(destination: Path, marker: str, force: bool) -> None:
    if destination == Path.cwd():
        raise FileExistsError(f"{destination}: is the working directory; name a new directory as the output")
    if destination.exists() and not destination.is_dir():
        raise NotADirectoryError(f"{destination}: a file is there; choose another output")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not force:
        raise FileExistsError(f"{destination}: exists and is not empty; use --force to replace it")
    if not (destination / marker).is_file():
        raise FileExistsError(
            f"{destination}: holds no {marker}, so --force does not replace it; choose another output"
        )


def _refuse_foreign(destination: Path, marker: str, subfolders: Collection[str]) -> None:
    """Replacing a directory must not take along what somebody put into it; a damaged marker cannot tell."""
    try:
        listed = json.loads((destination / marker).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    own = {marker, *listed, *subfolders}
    if foreign := sorted(path.name for path in destination.iterdir() if path.name not in own):
        raise FileExistsError(
            f"{destination}: holds {', '.join(foreign[:3])}, which {marker} does not list, so --force does not "
            "replace it; move that away or choose another output"
        )


def _remove_abandoned(destination: Path) -> None:
    """Remove temporaries of the same destination whose writer is gone: nobody holds their lock."""
    for left in destination.parent.glob(f".{glob.escape(destination.name)}.tmp-*"):
        try:
            with (left / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue


def _rename(temporary: Path, destination: Path) -> None:
    """Move the finished directory into place; what was there goes only when the new one stands."""
    if destination.is_dir() and any(destination.iterdir()):
        retired, lock = _make_locked(destination)
        with lock:
            old = destination.rename(retired / "old")
            try:
                temporary.rename(destination)
            except OSError:
                old.rename(destination)
                raise
            finally:
                shutil.rmtree(retired, ignore_errors=True)
    else:
        temporary.rename(destination)
    # Kept until here: a temporary without it would not be known as abandoned.
    (destination / _LOCK).unlink(missing_ok=True)
    _sync(destination.parent)


def _sync_tree(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
