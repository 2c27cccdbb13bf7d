"""Trials in which processes are killed (SIGKILL) at random moments, cheap enough for thousands: forked, without exec.

    child = fork_child(work)            # work(say) runs in the child; say(text) sends a line to the parent
    child.kill_after(0.01)              # SIGKILL after so many seconds, wherever it is then
    die_at_call(17)                     # or, in the child: SIGKILL at its 17th call of the filesystem
    outcome = child.wait(timeout_s=30)  # what it said before it died, and how it ended

The parent must have no threads when it forks.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple

_CALLS = ("open", "os.")
"""Audited by Python: opening, renaming, listing, making and removing; not writing and syncing."""

_STACK_S = 1.0

Say = Callable[[str], None]


class Outcome(NamedTuple):
    """How a child ended.

    Attributes
    ----------
    lines:
        What it said, whole lines only.
    killed:
        Whether SIGKILL ended it; else it came to its own end.
    failed:
        Whether it ended by an exception.
    """

    lines: list[str]
    killed: bool
    failed: bool


class Child:
    """A forked process that this one started."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid, self._fd, self._data = pid, fd, b""
        self._status: int | None = None

    def kill_after(self, seconds: float) -> None:
        """Wait, and kill it; it may have ended by then."""
        time.sleep(seconds)
        self.kill()

    def kill(self) -> None:
        if self._status is None:  # not reaped yet, so the pid is still its own
            os.kill(self.pid, signal.SIGKILL)

    def lines(self) -> list[str]:
        """What it has said so far; does not wait."""
        while select.select([self._fd], [], [], 0)[0]:
            data = os.read(self._fd, 1 << 16)
            if not data:
                break
            self._data += data
        return self._data[: self._data.rfind(b"\n") + 1].decode().splitlines()

    def wait(self, timeout_s: float = 240.0) -> Outcome:
        """Wait for its end; one that does not come to it says where it is (stderr) and is killed: that is an error."""
        deadline = time.monotonic() + timeout_s
        while self._status is None:
            self.lines()  # a full pipe would stop it
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
            elif time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGABRT)  # faulthandler prints all of its threads
                time.sleep(_STACK_S)
                self.kill()
                os.waitpid(self.pid, 0)
                raise TimeoutError(f"a child did not end within {timeout_s:g} s; it said {self.lines()[-3:]}")
            else:
                time.sleep(0.0005)
        lines = self.lines()
        os.close(self._fd)
        killed = os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal.SIGKILL
        return Outcome(lines, killed, not killed and self._status != 0)


def die_at_call(number: int) -> None:
    """End this process by SIGKILL at its ``number``-th call of the filesystem from now on, before it is made.

    Unlike a moment in time this does not depend on how busy the machine is.
    """
    left = number

    def hook(event: str, _: object) -> None:
        nonlocal left
        if event.startswith(_CALLS) and event != "os.kill":
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def fork_child(work: Callable[[Say], None]) -> Child:
    """Run ``work`` in a child; it leaves by ``os._exit`` and runs nothing of what the parent has registered."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return Child(pid, reading)
    code = 1
    try:
        os.close(reading)
        faulthandler.enable(file=sys.__stderr__)
        work(lambda text: (os.write(writing, f"{text}\n".encode()), None)[1])
        code = 0
    except BaseException:  # noqa: BLE001 - the child must not return into the parent's code
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(code)
