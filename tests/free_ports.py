"""Ports for servers of tests: neither those that the kernel gives to outgoing connections, nor those of runs."""

from __future__ import annotations

from collections.abc import Sequence

from hpcrl.ports import choose_blocks

HOST = "127.0.0.1"
#: above the range of sites' profiles, and below that of Linux's own choice
FIRST, LAST = 30000, 32767


def free_blocks(sizes: Sequence[int]) -> list[int]:
    """The first port of each block of neighbours."""
    return choose_blocks(sizes, first=FIRST, last=LAST, host=HOST)


def free_port() -> int:
    return free_blocks([1])[0]
