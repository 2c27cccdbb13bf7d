"""Runs by the keys that addresses of a board have: names of what was found, never paths."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from hpcrl.board.reading_pools import ReadingPools, SilentPlaceError
from hpcrl.errors import RunDirError
from hpcrl.runs.locate import runs_in_sight
from hpcrl.runs.rundir import RunDir

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_ODD = re.compile(r"[^A-Za-z0-9._-]+")


class _Listed(NamedTuple):
    path: str
    run: RunDir
    created_s: float


class RunKeys:
    """Finds runs below directories of runs.

    Parameters
    ----------
    roots:
        Directories of runs; none: as ``hpcrl ls`` finds them.
    pools:
        Threads in which directories are read.

    Attributes
    ----------
    silent:
        Directories that did not answer when they were last listed.
    """

    def __init__(self, roots: Sequence[str], pools: ReadingPools | None = None) -> None:
        self._roots = list(roots)
        self._pools = pools or ReadingPools()
        self.silent: list[str] = []
        self._last: dict[str, RunDir] = {}
        self._mutex = threading.Lock()

    def all(self) -> dict[str, RunDir]:
        """Return the runs that exist now, newest first, by key; of directories that do not answer there are none.

        Raises
        ------
        SilentPlaceError
            No directory answers.
        """
        runs, created_s, silent = dict[str, RunDir](), dict[str, float](), list[str]()
        roots: list[str | None] = [*self._roots] or [None]
        asked = [(root, self._asked(root)) for root in roots]
        for root, future in asked:
            try:
                if future is None:
                    raise SilentPlaceError
                for each in self._pools.wait(future):
                    runs.setdefault(each.path, each.run)
                    created_s.setdefault(each.path, each.created_s)
            except SilentPlaceError:
                silent.append(root or "a directory of runs")
        if len(silent) == len(roots):
            raise SilentPlaceError(f"{', '.join(silent)} does not answer")
        if len(self._roots) > 1:
            runs = dict(sorted(runs.items(), key=lambda item: created_s[item[0]], reverse=True))
        counts = Counter(run.name for run in runs.values())
        found = {_key(run, path, counts[run.name]): run for path, run in runs.items()}
        with self._mutex:
            # those of a directory that does not answer now stay known
            kept = {key: run for key, run in self._last.items() if silent and key not in found}
            self._last, self.silent = kept | found, silent
        return found

    def place(self, key: str) -> str:
        """Return the directory of the run that had a key last; empty where none had it."""
        with self._mutex:
            run = self._last.get(key)
        return "" if run is None else str(run.path.parent)

    def _asked(self, root: str | None) -> Future[list[_Listed]] | None:
        """Return the runs of a directory as they are listed in a thread; None where its threads hang."""

        def listed() -> list[_Listed]:
            return [_Listed(str(run.path.resolve()), run, _created(run)) for run in runs_in_sight(root)]

        try:
            return self._pools.submit(f"list {root}", listed)
        except SilentPlaceError:
            return None

    def find(self, key: str) -> RunDir:
        """Return the run of a key.

        Raises
        ------
        RunDirError
            No run has it now.
        """
        with self._mutex:
            run = self._last.get(key)
        if run is None or not _exists(run):
            run = self.all().get(key)
        if run is None:
            raise RunDirError(f"there is no run {key[:80]}\n    hint: the list has those that exist now")
        return run


def _key(run: RunDir, path: str, count: int) -> str:
    if count == 1 and _NAME.fullmatch(run.name):
        return run.name
    digest = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{_ODD.sub('-', run.name)[:60]}~{digest}"


def _created(run: RunDir) -> float:
    try:
        return run.plan_path.stat().st_mtime
    except OSError:
        return 0.0


def _exists(run: RunDir) -> bool:
    try:
        return run.record_path.is_file()
    except OSError:
        return False
