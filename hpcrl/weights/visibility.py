"""See names that another node has just created, in spite of caches of missing names.

An NFS client, or FUSE, may cache for a minute that a name did not exist, and a process that had looked it up does not
see it. So names are not looked up here: the parent is *listed*. On NFS a listing is validated with the server when the
directory is opened, and a changed directory invalidates the cached names. FUSE keeps the cached name nevertheless;
there the name is looked up in a way that a cache must not answer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

HIDDEN_PREFIX = ".hidden-"
"""Prefix of the name of a version that the collector is about to remove or to restore."""
_RESTORE_S = 10.0
_LOOK_S = 0.05
_AGAIN_S = 0.005


def missing_names(paths: Sequence[Path]) -> list[Path]:
    """Return those of ``paths`` (in one directory) that are missing, after a lease was written for them.

    A path that the collector has hidden is waited for: the collector is about to see the lease. A listing that is read
    while a name changes may hold neither the old nor the new name, so a missing path is searched twice.
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


def exists_uncached(path: Path) -> bool:
    """Return whether ``path`` exists, bypassing caches. Its parent's listing decides.

    A listed name that cannot be found is looked up again as the target of a rename, which the kernel never answers from
    a negative entry. The rename itself is that of a directory into itself: it always fails (EINVAL) and changes
    nothing.
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
