"""Directories in shared memory with a lock that shows whether their owners live. Standard library only, as the guard.

::

    /dev/shm/hpcrl-dock-<uid>-<32 digits>/     mode 0700
      alive                                    locked by the process that it belongs to, or by each of several

A directory has this file as long as it has its name: it gets the name after the lock, and loses it before the file is
removed. So a new user and a remover never conflict.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

from hpcrl.storage.trusted_paths import check_private

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "hpcrl-dock"
_ALIVE = "alive"
_REMOVED = ".removed-"
_JOIN_S = 10.0
_POLL_S = 0.01


def make_owned(base: Path) -> tuple[Path, int]:
    """Create a directory of this process below ``base``; return it and the lock on it (OSError if refused).

    The lock is an open file descriptor.
    """
    made, lock = _stage(base, fcntl.LOCK_EX)
    directory = base / made.name.removeprefix(".")
    made.rename(directory)
    return directory, lock


def join_owned(base: Path, digits: str) -> tuple[Path, int]:
    """Return a directory that several processes of this user share, and a lock on it; the first process creates it.

    Parameters
    ----------
    digits:
        Secret part of the directory's name.

    Raises
    ------
    OSError
        The filesystem refuses, or others may change the directory (`hpcrl.storage.trusted_paths.NotOursError`).
    """
    directory, deadline = base / f"{_PREFIX}-{os.geteuid()}-{digits}", time.monotonic() + _JOIN_S
    while True:
        if (lock := _join(directory)) is not None:
            return directory, lock
        made, lock = _stage(base, fcntl.LOCK_SH)
        try:
            made.rename(directory)
        except OSError:  # another process was faster, or a dead owner's directory is in the way
            os.close(lock)
            shutil.rmtree(made, ignore_errors=True)
            _remove_if_dead(directory)
        else:
            return directory, lock
        if time.monotonic() > deadline:
            raise TimeoutError(f"{directory} could not be joined within {_JOIN_S:g} s")
        time.sleep(_POLL_S)


def leave_owned(directory: Path, lock: int) -> None:
    """Release the directory; the last process that does so removes it."""
    os.close(lock)
    with contextlib.suppress(OSError):
        _remove_if_dead(directory)


def remove_dead(base: Path = SHARED_MEMORY) -> list[str]:
    """Remove directories of this user below ``base`` whose owners are dead; returns which."""
    removed = []
    for directory in base.glob(f"{_PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):
            if _remove_if_dead(directory):
                removed.append(str(directory))
    for directory in base.glob(f"{_REMOVED}{_PREFIX}-{os.geteuid()}-*"):
        with contextlib.suppress(OSError):  # its remover has died, or another process removes it at the same time
            check_private(directory)
            shutil.rmtree(directory, ignore_errors=True)
    return removed


def _stage(base: Path, kind: int) -> tuple[Path, int]:
    """Create and lock a directory under a hidden name; the caller then renames it so that others can find it."""
    made = base / f".{_PREFIX}-{os.geteuid()}-{os.urandom(16).hex()}"
    made.mkdir(mode=0o700)
    lock = os.open(made / _ALIVE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, kind | fcntl.LOCK_NB)
    return made, lock


def _join(directory: Path) -> int | None:
    """Return a lock on an existing directory; None if it does not exist or is being removed."""
    with contextlib.suppress(FileNotFoundError):
        check_private(directory)
        lock = os.open(directory / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), (directory / _ALIVE).lstat()):
                return lock
        os.close(lock)
    return None


def _remove_if_dead(directory: Path) -> bool:
    """Remove a directory whose lock is free; return False if it is held (OSError if another user owns it)."""
    check_private(directory)
    try:
        lock = os.open(directory / _ALIVE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # its owner has begun to remove it
        if not directory.exists():
            return False
        lock = -1
    try:
        if lock >= 0:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), (directory / _ALIVE).lstat()):
                return False
        removed = directory.with_name(f"{_REMOVED}{directory.name}-{os.urandom(4).hex()}")
        directory.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        if lock >= 0:
            os.close(lock)
    return True
