"""What the tests with a real Slurm share."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(what: str, probe: Callable[[], bool], *, deadline_s: float = 60.0) -> None:
    stop_at = time.monotonic() + deadline_s
    while not probe():
        assert time.monotonic() < stop_at, f"waited {deadline_s:g} s until {what}"
        time.sleep(0.25)  # a command of Slurm each time
