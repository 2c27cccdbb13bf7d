"""Values that are kept as long as files of runs are unchanged: same names, sizes, times and inodes.

Files of a run grow or are replaced, so that one of these differs after each change.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import xxhash

from hpcrl.runs.rundir import RunDir

T = TypeVar("T")

_RECORDS = ("", "metrics", "metrics/saved", "events", "rollouts/ledger", "checkpoints", "weights")
_ATTEMPT_FILES = ("restore.json",)
_HEARTBEAT = frozenset({"status.json"})
"""Files that change every few seconds while a run lives, whatever it does."""


def record_stamp(run: RunDir) -> str:
    """Return a stamp of the files in which a run records its steps, events, checkpoints and versions."""
    found: list[object] = [line for part in _RECORDS for line in _entries(run.path / part, but=_HEARTBEAT)]
    for attempt in run.attempts():
        found += [line for name in _ATTEMPT_FILES for line in _file(run.attempt_dir(attempt) / name)]
    return stamp_of(found)


def ledger_stamp(run: RunDir) -> str:
    """Return a stamp of the ledger of rollouts, and of the readable lines of steps."""
    return stamp_of([*_entries(run.rollouts_dir / "ledger"), *_entries(run.rollouts_dir)])


def files_stamp(paths: Iterable[Path]) -> str:
    """Return a stamp of some files."""
    return stamp_of(line for path in paths for line in _file(path))


def stamp_of(parts: Iterable[object]) -> str:
    """Return a stamp of values."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(repr(part).encode("utf-8", "backslashreplace") + b"\0")
    return digest.hexdigest()


def _entries(directory: Path, but: frozenset[str] = frozenset()) -> list[tuple[str, str, int, int, int]]:
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name not in but:
                    with contextlib.suppress(OSError):  # it was just removed
                        found.append((directory.name, entry.name, *_numbers(entry.stat())))
    except OSError:  # the directory does not exist
        return []
    return sorted(found)


def _file(path: Path) -> list[tuple[str, int, int, int]]:
    try:
        return [(str(path), *_numbers(path.stat()))]
    except OSError:
        return []


def _numbers(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


class StampedCache(Generic[T]):
    """Keeps the values that were used last, each with the stamp of the files that it was made of.

    Threads that ask for one value at once wait for the one that makes it.

    Parameters
    ----------
    most:
        Maximum number of values.
    """

    def __init__(self, most: int) -> None:
        self._most, self._mutex = most, threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[str, T]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def get(self, key: Hashable, stamp: str, make: Callable[[], T]) -> T:
        """Return the value of a key: the kept one where the stamp is the same, else what ``make`` returns."""
        with self._mutex:
            making = self._making.setdefault(key, threading.Lock())
        try:
            with making:
                with self._mutex:
                    kept = self._kept.get(key)
                    if kept is not None and kept[0] == stamp:
                        self._kept.move_to_end(key)
                        return kept[1]
                value = make()
                with self._mutex:
                    self._kept[key] = (stamp, value)
                    self._kept.move_to_end(key)
                    while len(self._kept) > self._most:
                        self._kept.popitem(last=False)
                return value
        finally:
            with self._mutex:
                if not making.locked():
                    self._making.pop(key, None)
