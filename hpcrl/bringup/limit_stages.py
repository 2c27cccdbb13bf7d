"""Time limits and interruptions of a stage."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hpcrl.errors import DeadlineError

_AGAIN_S = 30.0
"""After this many more seconds the limit is raised again, in case the first time was caught."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raise DeadlineError in the block when it takes longer.

    A system call that hangs is interrupted, unless the kernel does not let it. Outside the main thread the block has no
    limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(number: int, frame: FrameType | None) -> None:
        raise DeadlineError(
            f"{what} did not end within {seconds:g} s\n"
            "    hint: look at what is slow: Slurm's controller, the shared filesystem, imports of an environment"
        )

    before = signal.signal(signal.SIGALRM, expired)
    left_s, every_s = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left_s, every_s)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ends_with_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does: a login session may end while a job is waited for."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def without_interruption() -> Iterator[None]:
    """Hold Ctrl-C, SIGTERM and SIGHUP back until the block is over: a submission is whole or not there.

    Processes that the block starts inherit that they are blocked: Ctrl-C in a terminal is for all of its group. The
    signal of a process that has threads may go to another one, from which Python takes it to the main thread.
    """
    held, came = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}, list[int]()
    main = threading.current_thread() is threading.main_thread()
    handlers = {one: signal.signal(one, lambda number, _: came.append(number)) for one in held} if main else {}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in came[:1]:
            signal.raise_signal(number)
