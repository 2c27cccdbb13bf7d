"""The space that the run has left: a warning before it is used up, and the cause of an end after it was.

A run writes versions and checkpoints and removes old ones, so that free space goes up and down. The trend compares the
most free space in the first half of the window with that in the second half. It is extrapolated over a few times the
observed time, and over an hour at most.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from hpcrl.reporting import reports
from hpcrl.runs.cause import Cause, CauseKind
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.disk_space import Space, describe_space, find_space
from hpcrl.supervisor.status.status_writer import StatusWriter

_log = logging.getLogger(__name__)
_LOOK_S = 5.0
_VERDICT_S = 2.0
"""Timeout in seconds for the last check of an attempt."""
_WINDOW_S = 1800.0
_HORIZON_S = 3600.0
_FURTHER = 4.0
"""A trend is extrapolated over at most this multiple of the time it was observed."""
_GONE_BYTES, _GONE_INODES = 256 << 10, 4
"""Bytes and inodes below which the disk counts as full: too few for a checkpoint or a line of a log."""
_SHORTLY_S = 60.0
"""Seconds after the disk was full within which an end counts as its consequence."""
_NO_SPACE = tuple(f"[Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))
_FOLLOWS = frozenset(
    {CauseKind.ERROR, CauseKind.EXIT, CauseKind.EARLY_EXIT, CauseKind.SPAWN, CauseKind.NO_STEP}
    | {CauseKind.START_TIMEOUT, CauseKind.HUNG, CauseKind.STALE, CauseKind.SUPERVISOR_ERROR}
)
"""Ends that a full disk causes."""


class SpaceTrend:
    """Trend of the space that one limit (a filesystem, a quota) has left, in bytes or inodes."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []

    def see(self, now: float, left: int) -> None:
        """Add the amount that is left at a moment (monotonic seconds)."""
        self._seen = [entry for entry in self._seen if now - entry[0] <= _WINDOW_S]
        self._seen.append((now, left))

    def full_in_s(self) -> tuple[float, float] | None:
        """Return the seconds until nothing is left and the seconds that the trend covers; None if not foreseeable."""
        if len(self._seen) < 4:
            return None
        began, (now, left) = self._seen[0][0], self._seen[-1]
        span_s, half_s = now - began, (now - began) / 2
        first = [left for at, left in self._seen if at - began <= half_s]
        second = [left for at, left in self._seen if at - began > half_s]
        # maxima of both halves: files that come and go between checks must not look like a trend;
        # checks of one moment have no second half
        per_s = (max(first) - max(second)) / half_s if second else 0.0
        if per_s <= 0:
            return None
        full_s = left / per_s
        return (full_s, span_s) if full_s < min(_HORIZON_S, _FURTHER * span_s) else None


class SpaceWatch:
    """Watches the space that the filesystem of a run and its quotas leave.

    Parameters
    ----------
    find:
        Limits on a directory; `hpcrl.storage.disk_space.find_space` by default.
    clock:
        Monotonic seconds.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        board: StatusWriter,
        find: Callable[[Path], Sequence[Space]] = find_space,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._board, self._find, self._clock = run, board, find, clock
        self._trends: dict[tuple[str, str], SpaceTrend] = {}
        self._warned = self._without = False
        self._gone: tuple[float, str] = (float("-inf"), "")

    async def run(self) -> None:
        """Check periodically; never returns."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Check once; do nothing if the filesystem does not answer."""
        try:
            limits = await asyncio.to_thread(self._find, self._run.path)
        except OSError as error:
            _log.warning("the free space cannot be read now: %s", error)
            return
        warnings = [*self._missing(limits), *self._trending(limits), *reports.problems()]
        if warnings != self._board.warnings:
            self._board.warnings = warnings
            self._board.changed()

    def _missing(self, limits: Sequence[Space]) -> list[str]:
        refused = next((problem for problem in reports.problems() if any(sign in problem for sign in _NO_SPACE)), "")
        found = [
            f"{limit.what} at {self._run.path} is full: {_amount(left, what)} left"
            for limit in limits
            for what, left, least in (("bytes", limit.bytes, _GONE_BYTES), ("inodes", limit.inodes, _GONE_INODES))
            if left is not None and left < least
        ] or ([f"the filesystem at {self._run.path} refuses writes: {refused}"] if refused else [])
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
        """Return the cause of the end of an attempt; a full disk takes precedence over the failures that it causes."""
        try:
            async with asyncio.timeout(_VERDICT_S):
                await self.look()
        except TimeoutError:
            _log.warning("the free space could not be read within %g s", _VERDICT_S)
        said = f"{cause.message}\n{cause.traceback}"
        refused = next((sign for sign in _NO_SPACE if sign in said), "")
        here = refused and str(self._run.path) in said
        at_s, what = self._gone
        gone = self._without or cause.time_s - at_s < _SHORTLY_S
        # a full disk explains only failures of kinds that it causes, and close to it in time or path
        if cause.kind not in _FOLLOWS or not (gone or here):
            return cause
        if not gone:  # a quota that cannot be queried, or space that was freed meanwhile
            left = await asyncio.to_thread(describe_space, self._run.path)
            what = f"the filesystem at {self._run.path} refused writes ({refused}); {left} now"
        return msgspec.structs.replace(cause, kind=CauseKind.DISK_FULL, message=f"{what}; {cause.message}")


def _amount(left: int, what: str) -> str:
    if what == "bytes" and left >= 1 << 20:
        return f"{left / (1 << 30):.3g} GiB" if left >= 1 << 30 else f"{left / (1 << 20):.3g} MiB"
    return f"{left:,} {what}"


def _words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
