"""Threads that read, a few for each directory of runs: a filesystem that hangs delays no page about others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from hpcrl.processes.daemon_threads import DaemonExecutor

T = TypeVar("T")

THREADS = 2
"""Threads of a place."""
PATIENCE_S = 10.0
"""Seconds after which a call counts as hung: a place whose threads all hang is not asked again until one returns."""


class SilentPlaceError(OSError):
    """A filesystem does not answer."""


class ReadingPools:
    """Pools of threads by place: a directory of runs, or what reads several of them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._pools: dict[str, DaemonExecutor] = {}
        self._begun_s: dict[str, dict[Future[Any], float]] = {}

    def submit(self, place: str, call: Callable[[], T]) -> Future[T]:
        """Call something in a thread of a place.

        Raises
        ------
        SilentPlaceError
            All threads of the place hang.
        """
        with self._mutex:
            begun_s, now_s = self._begun_s.setdefault(place, {}), time.monotonic()
            if sum(now_s - begin_s > PATIENCE_S for begin_s in begun_s.values()) >= THREADS:
                raise SilentPlaceError("the filesystem does not answer")
            if place not in self._pools:
                self._pools[place] = DaemonExecutor(THREADS, "reading")
            future = self._pools[place].submit(call)
            begun_s[future] = now_s
        future.add_done_callback(lambda done: self._ended(place, done))
        return future

    def wait(self, future: Future[T]) -> T:
        """Return what a call returns (SilentPlaceError where it takes more than the patience)."""
        try:
            return future.result(PATIENCE_S)
        except TimeoutError:
            if future.done():  # the error is of the call
                raise
            raise SilentPlaceError("the filesystem does not answer") from None

    def _ended(self, place: str, future: Future[Any]) -> None:
        with self._mutex:
            self._begun_s[place].pop(future, None)
