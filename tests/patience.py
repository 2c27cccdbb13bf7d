"""How long tests wait: deadlines hold on an idle machine, and are stretched on one that is short of processors."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MOST = 6.0


def patience() -> float:
    """Processes that want a processor for each that there is, at least 1: deadlines are multiplied by this."""
    return min(_MOST, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def wait_for(probe: Callable[[], Any], timeout_s: float, what: str, *, every_s: float = 0.1) -> Any:
    """Poll until ``probe`` gives something, which is returned; for longer while the machine is busy."""
    began_s, most = time.monotonic(), patience()
    while not (value := probe()):
        most = max(most, patience())
        waited_s = time.monotonic() - began_s
        assert waited_s < timeout_s * most, f"no {what} within {waited_s:.0f} s"
        time.sleep(every_s)
    return value


def hold_reader(fifo: Path, timeout_s: float) -> int:
    """Wait until somebody reads a FIFO, which then hangs until the returned descriptor is closed."""
    deadline = time.monotonic() + timeout_s * patience()
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > deadline:
                raise
        time.sleep(0.02)
