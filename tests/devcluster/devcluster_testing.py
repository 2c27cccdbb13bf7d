"""What the tests with a real Slurm share."""

from __future__ import annotations

from collections.abc import Callable

from patience import wait_for


def wait_until(what: str, probe: Callable[[], bool], *, deadline_s: float = 60.0) -> None:
    wait_for(probe, deadline_s, f"moment at which {what}", every_s=0.25)  # a command of Slurm each time
