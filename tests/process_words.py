"""What processes were started with, in lists of processes of which some end meanwhile."""

from __future__ import annotations

import psutil


def words_of(process: psutil.Process) -> list[str]:
    """Return the command of a process; empty where it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def variables_of(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; empty where it has ended."""
    try:
        return process.environ()
    except psutil.Error:
        return {}
