"""Seeing names that another node has just made, through caches that remember that they were not there.

An NFS client, or FUSE, may remember for a minute that a name did not exist; whoever had looked for it stays blind.
So nobody asks for names here: the parent is *listed*. On NFS a listing is checked with the server when the directory
is opened, and a changed directory ends what was remembered of its names. FUSE keeps the memory of a name all the
same; there the name is looked up in a way that no cache may answer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["HIDDEN_PREFIX", "missing_names", "reveal"]

HIDDEN_PREFIX = ".hidden-"
"""What the collector puts before the name of a version that it is about to remove, or to restore."""
_RESTORE_S = 10.0
_LOOK_S = 0.05
_AGAIN_S = 0.005


def missing_names(paths: Sequence[Path]) -> list[Path]:
    """Which of ``paths`` (in one directory) are not there. For who has just said that they must stay.

    One that the collector has hidden is waited for: it is about to see what was said. A listing that is read while a
    name changes may hold neither the old nor the new one, so what is missing is looked for twice.
    """
    deadline = time.monotonic() + _RESTORE_S
    before: list[Path] | None = None
    while True:
        try:
            names = set(os.listdir(paths[0].parent)) if paths else set()
        except FileNotFoundError:
            names = set()
        missing = [path for path in paths if path.name not in names]
        hidden = any(f"{HIDDEN_PREFIX}{path.name}" in names for path in missing)
        if not missing or (not hidden and missing == before) or time.monotonic() > deadline:
            return missing
        before = None if hidden else missing
        time.sleep(_LOOK_S if hidden else _AGAIN_S)


def reveal(path: Path) -> bool:
    """Whether ``path`` is there, whatever was remembered of it. Its parent's listing decides.

    A listed name that cannot be found is looked up again as the target of a rename, which the kernel never
    answers from a negative entry. The rename itself is that of a directory into itself: it always fails (EINVAL) and
    changes nothing.
    """
    try:
        if path.name not in os.listdir(path.parent):
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not path.exists():
        with contextlib.suppress(OSError):
            os.rename(path.parent, path)
    return path.exists()
