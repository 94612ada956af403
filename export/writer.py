"""Directories that are complete or absent.

A directory is filled under a temporary name beside its destination, synced, and renamed. The temporary holds a locked
file while its writer lives, so that the next writer can tell what a killed one left behind, and remove it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = ".lock"


@contextmanager
def writing_directory(destination: str | Path, marker: str, force: bool) -> Iterator[Path]:
    """A new directory to fill; on leaving it becomes `destination`, on an error it vanishes.

    Args:
        destination: Where the finished directory goes.
        marker: A file that every such directory holds; only a directory that holds it is ever replaced.
        force: Replace what is there.

    Raises:
        FileExistsError: Something is there, and `force` is off or it is not of this kind.
        NotADirectoryError: A file is there.
    """
    destination = Path(destination).absolute()
    _refuse_existing(destination, marker, force)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(destination)
    temporary = Path(tempfile.mkdtemp(prefix=f".{destination.name}.tmp-", dir=destination.parent))
    lock = (temporary / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield temporary
        (temporary / _LOCK).unlink()
        temporary.chmod(0o777 & ~_umask())
        _sync_tree(temporary)
        _refuse_existing(destination, marker, force)
        _rename(temporary, destination)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        lock.close()


def _refuse_existing(destination: Path, marker: str, force: bool) -> None:
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


def _remove_abandoned(destination: Path) -> None:
    """Remove temporaries of the same destination whose writer is gone: nobody holds their lock."""
    for left in destination.parent.glob(f".{destination.name}.tmp-*"):
        try:
            with (left / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue


def _rename(temporary: Path, destination: Path) -> None:
    """Move the finished directory into place; what was there goes only after the new one stands."""
    if destination.is_dir():
        retired = Path(tempfile.mkdtemp(prefix=f".{destination.name}.tmp-", dir=destination.parent))
        old = retired / "old"
        destination.rename(old)
        try:
            temporary.rename(destination)
        except OSError:
            old.rename(destination)
            raise
        finally:
            shutil.rmtree(retired, ignore_errors=True)
    else:
        temporary.rename(destination)
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


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
