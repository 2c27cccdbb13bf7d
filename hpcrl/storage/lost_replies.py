"""Changes of names on a shared filesystem that also succeed where the answer to them was lost.

A file server may do what it was asked, and its answer be lost: it fails over, or a connection breaks. The client then
asks again and receives the present state: for a rename that the source does not exist (ENOENT), for a link or a
directory that the target exists (EEXIST). NFS servers cache answers for a while, but not across a failover. So these
functions check the names before they believe an error. A file keeps its identity (device and inode) in a rename.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

_MAX_REMOVALS = 100
"""Maximum repetitions of removing a tree after the answer to the removal of a file was lost."""


def rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename as `os.rename` does (FileNotFoundError: the source does not exist, and this call did not rename it)."""
    # by its name at the time of the call: so do tests that lose answers
    _rename(lambda: os.rename(source, target), source, target)


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename a file over another one, as `os.replace` does; errors as for `rename`."""
    _rename(lambda: os.replace(source, target), source, target)


def link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Make a hard link, as `os.link` does (FileExistsError: the target is another file than the source)."""
    try:
        os.link(source, target)
    except FileExistsError:
        if _identity(target) != _identity(source):
            raise


def make_own_directory(path: Path) -> None:
    """Make a directory that no other process makes: its name is unique, or only the caller writes in its parent.

    Raises
    ------
    FileExistsError
        Something of that name exists and is not an empty directory.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_symlink() or not path.is_dir() or os.listdir(path):
            raise


def unlink(path: Path) -> bool:
    """Remove a name that no other process removes; return whether it existed."""
    if not os.path.lexists(path):
        return False
    path.unlink(missing_ok=True)
    return True


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, where it is there (OSError: some of it stays)."""
    for _ in range(_MAX_REMOVALS):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            # a file inside of the tree has vanished; the others are still there
            if os.path.lexists(path):
                continue
        return
    shutil.rmtree(path)


def _rename(call: Callable[[], None], source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    before = _identity(source)
    try:
        call()
    except FileNotFoundError:
        # an NFS client may remember for a while that a name did not exist: force a new listing
        for name in (source, target):
            with contextlib.suppress(OSError):
                os.listdir(os.path.dirname(name) or ".")
        if before is None or _identity(source) is not None or _identity(target) != before:
            raise


def _identity(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return device and inode of what has this name; None where nothing has."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
