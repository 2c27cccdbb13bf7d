"""Work of a rank in a thread, one piece at a time: what the training does not wait for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""Seconds between two checks of a waiting caller."""


class Background:
    """Runs one piece of work at a time; its failure is raised by the next `wait`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Begin ``work`` in a thread called ``name``; what was begun before has been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised by the next wait
                _log.warning("%s failed: %s", name, error)
                self._failure = error

        # a daemon: a process that fails elsewhere must not hang on a filesystem that does
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def wait(self, limit_s: float, on_look: Callable[[], None]) -> bool:
        """Wait at most ``limit_s`` seconds; whether nothing is under way any more. Raises what the work has raised.

        ``on_look`` is called about once a second.
        """
        if self._thread is not None:
            deadline = time.monotonic() + limit_s
            while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
                self._thread.join(min(left_s, _LOOK_S))
                on_look()
            if self._thread.is_alive():
                return False
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True
