"""The space that the run has left: a warning before it is gone, and the cause where it was.

A run writes versions and checkpoints and removes old ones, so that free space goes up and down. What counts is the
most that was free in the first and in the second half of what was seen: how much lower the second is. It is carried
on for a few times as long as was looked, and for an hour at most.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hpcrl import reporting
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.rundir import RunDir
from hpcrl.space import Space, describe_space, find_space
from hpcrl.supervisor.board import Board

__all__ = ["SpaceTrend", "SpaceWatch"]

_log = logging.getLogger(__name__)
_LOOK_S = 5.0
_VERDICT_S = 2.0
"""How long a last look may take."""
_WINDOW_S = 1800.0
_HORIZON_S = 3600.0
_FURTHER = 4.0
"""A trend is carried on for so many times as long as it was seen."""
_GONE_BYTES, _GONE_INODES = 256 << 10, 4
"""With less there is no space: not for a checkpoint, nor for a line of a log."""
_SHORTLY_S = 60.0
"""What ends so soon after there was no space ended by that."""
_NO_SPACE = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))
_FOLLOWS = frozenset(
    {CauseKind.ERROR, CauseKind.EXIT, CauseKind.EARLY_EXIT, CauseKind.SPAWN, CauseKind.NO_STEP}
    | {CauseKind.START_TIMEOUT, CauseKind.HUNG, CauseKind.STALE, CauseKind.SUPERVISOR_ERROR}
)
"""Ends that a full disk brings about."""


class SpaceTrend:
    """What one limit (a filesystem, a quota) has left over time, of bytes or of inodes."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def see(self, now: float, left: int) -> None:
        """Take in what is left at a moment (monotonic seconds)."""
        self._seen = [entry for entry in self._seen if now - entry[0] <= _WINDOW_S]
        self._seen.append((now, left))

    def full_in_s(self) -> tuple[float, float] | None:
        """Seconds until nothing is left, and of how many seconds the trend is; None where it is not in sight."""
        if len(self._seen) < 4:
            return None
        began, (now, left) = self._seen[0][0], self._seen[-1]
        span_s, half_s = now - began, (now - began) / 2
        first = [left for at, left in self._seen if at - began <= half_s]
        second = [left for at, left in self._seen if at - began > half_s]
        # looks of one moment have no second half
        per_s = (max(first) - max(second)) / half_s if second else 0.0
        if per_s <= 0:
            return None
        full_s = left / per_s
        return (full_s, span_s) if full_s < min(_HORIZON_S, _FURTHER * span_s) else None


class SpaceWatch:
    """Looks at what the filesystem of a run and its quotas leave.

    Parameters
    ----------
    find:
        Limits on a directory; `hpcrl.space.find_space` by default.
    clock:
        Monotonic seconds.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        board: Board,
        find: Callable[[Path], Sequence[Space]] = find_space,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._board, self._find, self._clock = run, board, find, clock
        self._trends: dict[tuple[str, str], SpaceTrend] = {}
        self._warned = self._without = False
        self._gone: tuple[float, str] = (float("-inf"), "")

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Look once. Nothing where the filesystem does not answer."""
        try:
            limits = await asyncio.to_thread(self._find, self._run.path)
        except OSError as error:
            _log.warning("what space is left cannot be seen now: %s", error)
            return
        warnings = [*self._missing(limits), *self._trending(limits), *reporting.problems()]
        if warnings != self._board.warnings:
            self._board.warnings = warnings
            self._board.changed()

    def _missing(self, limits: Sequence[Space]) -> list[str]:
        refused = next((problem for problem in reporting.problems() if any(sign in problem for sign in _NO_SPACE)), "")
        found = [
            f"{limit.what} at {self._run.path} is full: {_amount(left, what)} left"
            for limit in limits
            for what, left, least in (("bytes", limit.bytes, _GONE_BYTES), ("inodes", limit.inodes, _GONE_INODES))
            if left is not None and left < least
        ] or ([f"the filesystem at {self._run.path} takes no more: {refused}"] if refused else [])
        if found:
            self._gone = (time.time(), found[0])
            if not self._without:
                self._board.emit("run.space_gone", what=found[0])
        self._without = bool(found)
        return found

    def _trending(self, limits: Sequence[Space]) -> list[str]:
        found = []
        for limit in limits:
            for what, left in (("bytes", limit.bytes), ("inodes", limit.inodes)):
                if left is None:
                    continue
                trend = self._trends.setdefault((limit.what, what), SpaceTrend())
                trend.see(self._clock(), left)
                if (sight := trend.full_in_s()) is not None and not self._without:
                    full_s, span_s = sight
                    rate = f"at the rate of the last {_words(span_s)} it is full in about {_words(full_s)}"
                    found.append(f"{limit.what} at {self._run.path} leaves {_amount(left, what)}; {rate}")
                    if not self._warned:
                        self._board.emit("run.space_low", what=limit.what, left=left, of=what, full_in_s=full_s)
                        _log.warning("%s", found[-1])
        self._warned = bool(found)
        return found

    async def explain(self, cause: Cause) -> Cause:
        """The cause of the end of an attempt: a full disk comes before what it brought about."""
        try:
            async with asyncio.timeout(_VERDICT_S):
                await self.look()
        except TimeoutError:
            _log.warning("what space is left could not be seen within %g s", _VERDICT_S)
        said = f"{cause.message}\n{cause.traceback}"
        refused = next((sign for sign in _NO_SPACE if sign in said), "")
        here = refused and str(self._run.path) in said
        at_s, what = self._gone
        gone = self._without or cause.time_s - at_s < _SHORTLY_S
        if cause.kind not in _FOLLOWS or not (gone or here):
            return cause
        if not gone:  # a quota that cannot be asked for, or somebody made room meanwhile
            left = await asyncio.to_thread(describe_space, self._run.path)
            what = f"the filesystem at {self._run.path} took no more ({refused}); {left} now"
        return msgspec.structs.replace(cause, kind=CauseKind.DISK_FULL, message=f"{what}; {cause.message}")


def _amount(left: int, what: str) -> str:
    if what == "bytes" and left >= 1 << 20:
        return f"{left / (1 << 30):.3g} GiB" if left >= 1 << 30 else f"{left / (1 << 20):.3g} MiB"
    return f"{left:,} {what}"


def _words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
