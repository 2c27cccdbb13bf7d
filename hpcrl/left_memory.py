"""Directories in shared memory that say by a lock whether their owner lives. Standard library only, as the guard is.

::

    /dev/shm/hpcrl-dock-<uid>-<32 random digits>/     mode 0700
      alive                                           locked by the process that it belongs to
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

from hpcrl.ours import check_private

__all__ = ["SHARED_MEMORY", "make_owned", "remove_dead"]

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "hpcrl-dock"
_ALIVE = "alive"


def make_owned(base: Path) -> tuple[Path, int]:
    """A new directory of this process below ``base``, and the lock on it, an open file (OSError where refused)."""
    directory = base / f"{_PREFIX}-{os.geteuid()}-{os.urandom(16).hex()}"
    # locked before it has the name by which others find it
    made = base / f".{directory.name}"
    made.mkdir(mode=0o700)
    lock = os.open(made / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    made.rename(directory)
    return directory, lock


def remove_dead(base: Path = SHARED_MEMORY) -> list[str]:
    """Remove directories of this user below ``base`` whose owners are dead; returns which."""
    removed = []
    for directory in base.glob(f"{_PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            check_private(directory)
            if _is_dead(directory):
                shutil.rmtree(directory, ignore_errors=True)
                removed.append(str(directory))
    return removed


def _is_dead(directory: Path) -> bool:
    """Whether nobody holds the lock."""
    try:
        fd = os.open(directory / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody has begun to remove it
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
