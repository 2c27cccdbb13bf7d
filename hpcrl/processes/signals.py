"""Signals of processes with an event loop, which end the process also where its event loop hangs.

``loop.add_signal_handler`` calls its handler in a turn of the loop. A loop that hangs in a read of the shared
filesystem makes no turn, and the process ignores SIGTERM until it is killed. Here a thread receives signals.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping

_log = logging.getLogger(__name__)

_STUCK_S = 8.0
"""Timeout in seconds for each turn of the event loop after a signal that ends the process."""
_PING_S = 0.5
_ENDING = frozenset({signal.SIGTERM, signal.SIGINT})
_EXIT = 128


class _Listener(threading.Thread):
    """Receives the numbers of signals from the interpreter, which writes them into a socket at once."""

    def __init__(self) -> None:
        super().__init__(name="signals", daemon=True)
        self._received, self._written = socket.socketpair()
        self._written.setblocking(False)
        self.loop = asyncio.get_running_loop()
        self.handlers: Mapping[int, Callable[[], None]] = {}
        self._ends = False
        signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        while numbers := self._received.recv(64):
            for number in numbers:
                if (handler := self.handlers.get(number)) is not None:
                    self._pass_on(number, handler)

    def _pass_on(self, number: int, handler: Callable[[], None]) -> None:
        try:
            self.loop.call_soon_threadsafe(handler)
        except RuntimeError:
            return  # the loop has ended, and the process is about to
        if number in _ENDING and not self._ends:
            self._ends = True
            threading.Thread(target=self._watch_end, args=(number,), name="leave", daemon=True).start()

    def _watch_end(self, number: int) -> None:
        """End the process where its loop does not turn any more on the way to its end."""
        while True:
            turned = threading.Event()
            try:
                self.loop.call_soon_threadsafe(turned.set)
            except RuntimeError:
                return
            if not turned.wait(_STUCK_S) and not self.loop.is_closed():
                name = signal.Signals(number).name
                _log.critical("this process ends: after %s its event loop has not turned for %g s", name, _STUCK_S)
                os._exit(_EXIT + number)
            time.sleep(_PING_S)


_listeners: list[_Listener] = []


def handle_signals(handlers: Mapping[int, Callable[[], None]]) -> None:
    """Call these functions in the running event loop when their signals arrive; earlier functions are replaced.

    Where the loop does not turn for seconds after SIGTERM or SIGINT, until it is closed, the process exits with 128 and
    the number of the signal. To be called from the main thread.
    """
    if not _listeners or _listeners[-1].loop is not asyncio.get_running_loop():
        _listeners.append(_Listener())
        _listeners[-1].start()
    _listeners[-1].handlers = dict(handlers)
    for number in handlers:
        signal.signal(number, _take)
        signal.siginterrupt(number, False)


async def stopped_by_signal(work: Callable[[], Awaitable[None]]) -> bool:
    """Await ``work`` in this task, which SIGTERM and SIGINT cancel; return whether one of them did.

    Raises
    ------
    asyncio.CancelledError
        The task was cancelled by anything else.
    """
    task = asyncio.current_task()
    assert task is not None
    stopping = False

    def stop() -> None:
        nonlocal stopping
        stopping = True
        task.cancel()

    handle_signals({signal.SIGTERM: stop, signal.SIGINT: stop})
    try:
        await work()
    except asyncio.CancelledError:
        if not stopping:
            raise
        return True
    return False


def _take(number: int, frame: object) -> None:
    """Do nothing; a handler must exist so that the interpreter records the signal."""
