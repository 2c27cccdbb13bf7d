"""Ports for servers of tests: neither those that the kernel gives to outgoing connections, nor those of runs."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Sequence

from hpcrl.network.ports import choose_blocks

HOST = "127.0.0.1"
#: above the range of sites' profiles, and below that of Linux's own choice
FIRST, LAST = 30000, 32767
#: of a process: tests of another, which runs at the same time, choose none of them before our server binds its own
LANE = 230


class Lane:
    """Ports of this process alone, given out in turn."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        lanes = range(FIRST, LAST - LANE + 2, LANE)
        for self.first in lanes:
            self._name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with contextlib.suppress(OSError):
                self._name.bind(f"\0hpcrl-tests-{self.first}")
                break
            self._name.close()
        else:
            raise AssertionError(f"{len(lanes)} processes choose ports for tests already")
        # what had the lane before may have left servers that are ending
        self._next = self.first + random.randrange(LANE)

    def choose(self, sizes: Sequence[int]) -> list[int]:
        last = self.first + LANE - 1
        blocks = choose_blocks(sizes, first=self.first, last=last, host=HOST, start=self._next)
        self._next = self.first + (blocks[-1] + sizes[-1] - self.first) % LANE
        return blocks


_lane: Lane | None = None


def free_blocks(sizes: Sequence[int]) -> list[int]:
    """The first port of each block of neighbours; those that were given out last come last."""
    global _lane  # noqa: PLW0603
    if _lane is None or _lane.pid != os.getpid():  # a fork's lane is its parent's
        _lane = Lane()
    return _lane.choose(sizes)


def free_port() -> int:
    return free_blocks([1])[0]
