"""Stacks of a replica, which the guards of its tasks have taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Dump(NamedTuple):
    """Stacks of a replica, taken on its nodes.

    Attributes
    ----------
    paths:
        Files, one a task.
    frames:
        Top frames of the most informative process.
    stopped:
        Pids of processes that a signal has stopped.
    problem:
        Reason why there are no stacks; empty if there are.
    """

    paths: list[str]
    frames: list[str]
    stopped: list[int]
    problem: str


def join_dumps(dumps: Sequence[Dump]) -> Dump | None:
    """Merge the dumps of all tasks: the words of the most informative one, and all files; None without dumps."""
    if not dumps:
        return None
    # a task with a stopped process, or else one with frames
    best = max(dumps, key=lambda dump: (bool(dump.stopped), bool(dump.frames)))
    paths = [path for dump in dumps for path in dump.paths]
    return best._replace(paths=[*best.paths, *(path for path in paths if path not in best.paths)])
