"""Files of columns that are not needed any more: found and removed in the background.

A file that is left costs only space until the search after the next step. So a refusal of the filesystem is logged once
and tried again, and a filesystem that hangs blocks only a thread for which the end of the process does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from hpcrl.errors import HpcrlError
from hpcrl.processes.uncancellable_future import promise

_log = logging.getLogger(__name__)
_SLOW_S = 60.0
T = TypeVar("T")


class PayloadGarbageCollector:
    """Removes such files, one look at a time; for an event loop.

    Attributes
    ----------
    failures:
        Looks that the filesystem did not let end, and files that it did not let go.
    """

    def __init__(
        self,
        payload_dir: Path,
        *,
        checkpoints: Callable[[], Sequence[int]],
        choose: Callable[[Sequence[int], set[str]], list[str]],
    ) -> None:
        """Initialise; no search is started.

        Parameters
        ----------
        payload_dir:
            Directory of the files.
        checkpoints:
            Steps of the joint checkpoints that are there.
        choose:
            Returns the files that may be removed, by these steps; called in the event loop.
        """
        self._payload_dir, self._checkpoints, self._choose = payload_dir, checkpoints, choose
        self._look: asyncio.Task[None] | None = None
        self._began_s, self._said_slow, self._said = 0.0, False, False
        self.failures = 0

    def look(self, *, before: str) -> None:
        """Start a search unless one is running; ``before`` is the first file that must not be removed."""
        if self._look is None or self._look.done():
            self._began_s, self._said_slow = time.monotonic(), False
            self._look = asyncio.get_running_loop().create_task(self._remove_unneeded(before))
            return
        waited_s = time.monotonic() - self._began_s
        if waited_s > _SLOW_S and not self._said_slow:
            self._said_slow = True
            what = "unneeded columns could not be removed for %.0f s; the run continues"
            _log.warning(what, waited_s)

    async def _remove_unneeded(self, before: str) -> None:
        try:
            steps, there = await _in_own_thread(self._read, "unneeded-columns")
            doomed = self._choose(steps, {file for file in there if file < before})
            refused = await _in_own_thread(lambda: self.remove(doomed), "unneeded-columns")
        except (OSError, HpcrlError) as error:
            self.failures += 1
            refused = [error]
        if refused and not self._said:
            _log.warning("unneeded columns are not removed now: %s; each step tries again", refused[0])
        self._said = bool(refused)

    def _read(self) -> tuple[Sequence[int], set[str]]:
        return self._checkpoints(), {path.name for path in self._payload_dir.iterdir()}

    def remove(self, files: Iterable[str]) -> list[OSError | HpcrlError]:
        """Remove files by name; return why some remain."""
        refused: list[OSError | HpcrlError] = []
        for file in files:
            try:
                (self._payload_dir / file).unlink(missing_ok=True)
            except OSError as error:
                self.failures += 1
                refused.append(error)
        return refused


def _in_own_thread(action: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``action`` in a thread of its own and return the future of its result.

    An event loop waits for the threads of its shared executor when it ends; it does not wait for this one.
    """
    done: Future[T] = promise()

    def run() -> None:
        try:
            result = action()
        except BaseException as error:  # noqa: BLE001 - raised to who waits
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(done)
