"""Log files of a run: which there are, merged by time, followed."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import UsageError
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir

__all__ = ["LogFile", "LogFilter", "LogLine", "find_log_files", "follow_logs", "format_line", "read_logs"]

SUPERVISOR = "supervisor"
"""Stands for a role in filters: the supervisor's own words, which submitit keeps."""

_POLL_S = 0.3
_NAME = re.compile(r"(\d+)-(\d+)\.log")
#: ``2026-01-31 12:00:00,123`` of logging, with a dot or a T elsewhere
_ISO_TIME = re.compile(r"\[?(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)[.,](\d{1,6})")
#: ``W0131 12:00:00.123456`` of torch and glog
_GLOG_TIME = re.compile(r"\[?[IWEFD](\d\d)(\d\d) (\d\d:\d\d:\d\d)\.(\d{1,6})")
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TAIL_BYTES_A_LINE = 400
_LEAST_TAIL_BYTES = 1 << 20


class LogFile(NamedTuple):
    """One log file and whose it is."""

    path: Path
    role: str
    replica: int
    rank: int

    @property
    def label(self) -> str:
        """``engine 0``, ``trainer 0.1`` (rank 1)."""
        return f"{self.role} {self.replica}" + (f".{self.rank}" if self.rank else "")


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a log, with the role, replica and rank that wrote it.

    Attributes
    ----------
    time_s:
        Of the line, or of the nearest one before it that tells; 0 where none does.
    line:
        Without the line break.
    """

    role: str
    replica: int
    rank: int
    attempt: int
    time_s: float
    line: str


class LogFilter(NamedTuple):
    """Which lines are wanted; None is no restriction."""

    attempt: int
    role: str | None = None
    replica: int | None = None
    rank: int | None = None
    grep: re.Pattern[str] | None = None
    since_s: float | None = None

    @classmethod
    def make(
        cls,
        run: RunDir,
        *,
        role: str | None = None,
        replica: int | None = None,
        rank: int | None = None,
        attempt: int | None = None,
        grep: str | None = None,
        since: str | None = None,
    ) -> LogFilter:
        """Make a filter from what a person says.

        ``role`` may name a replica, too (``engine/0``); ``since`` is an age (``10m``) or a time (``2026-01-31 12:00``).

        Raises
        ------
        UsageError
            There is no such attempt or role, ``grep`` is no regular expression, or ``since`` no time.
        """
        attempts = run.attempts()
        if attempt is None:
            attempt = attempts[-1] if attempts else 1
        elif attempt not in attempts:
            known = ", ".join(map(str, attempts)) or "none yet"
            raise UsageError(f"{run.name} has no attempt {attempt}; attempts: {known}")
        roles = [group.role.value for group in run.plan().groups]
        role, replica = _role_and_replica(role, replica)
        if role is not None and role not in (*roles, SUPERVISOR):
            raise UsageError(f"{run.name} has no role {role}\n    hint: it has {', '.join((*roles, SUPERVISOR))}")
        try:
            pattern = None if grep is None else re.compile(grep)
        except re.error as error:
            raise UsageError(f"--grep {grep!r} is no regular expression: {error}") from error
        return cls(attempt, role, replica, rank, pattern, None if since is None else _since_s(since))

    def shows(self, line: str, time_s: float) -> bool:
        """Whether this line of a file is wanted; one whose time nobody knows (0) is never too old."""
        if self.since_s is not None and 0.0 < time_s < self.since_s:
            return False
        return self.grep is None or self.grep.search(line) is not None

    def takes(self, file: LogFile) -> bool:
        """Whether lines of this file are wanted."""
        wanted = ((self.role, file.role), (self.replica, file.replica), (self.rank, file.rank))
        return all(want is None or want == have for want, have in wanted)


def _role_and_replica(role: str | None, replica: int | None) -> tuple[str | None, int | None]:
    """Read ``engine/0`` as `hpcrl shell` does (UsageError where the number is none, or another one was given)."""
    name, slash, number = (role or "").partition("/")
    if not slash:
        return role, replica
    if not number.isdecimal():
        raise UsageError(f"--role {role}: write a role, or a role and the number of a replica, such as {name}/0")
    if replica not in (None, int(number)):
        raise UsageError(f"--role {role} and --replica {replica} name two replicas\n    hint: give one of them")
    return name, int(number)


def _since_s(text: str) -> float:
    """An age (``90s``, ``10m``, ``2h``, ``1d``) or a local time, as seconds since the epoch."""
    if match := _AGE.fullmatch(text):
        return time.time() - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError(
            f"--since {text!r} is no time\n    hint: an age as 90s, 10m, 2h, 1d; or 2026-01-31T12:00"
        ) from error


def find_log_files(run: RunDir, wanted: LogFilter) -> list[LogFile]:
    """Log files that match, in order of role, replica and rank."""
    if wanted.role == SUPERVISOR:
        return _supervisor_files(run, wanted.attempt)
    files = []
    for path in (run.attempt_dir(wanted.attempt) / "logs").glob("*/*.log"):
        if match := _NAME.fullmatch(path.name):
            files.append(LogFile(path, path.parent.name, int(match[1]), int(match[2])))
    return sorted((file for file in files if wanted.takes(file)), key=lambda file: file[1:])


def _supervisor_files(run: RunDir, attempt: int) -> list[LogFile]:
    submissions = [s for s in RunRecord.read(run).submissions if s.after_attempt < attempt]
    if not submissions:
        return []
    newest = submissions[-1]
    paths = [Path(newest.folder) / f"{newest.job_id}_0_log.{kind}" for kind in ("out", "err")]
    return [LogFile(path, SUPERVISOR, 0, 0) for path in paths if path.is_file()]


def read_logs(run: RunDir, wanted: LogFilter, *, lines: int = 0) -> list[LogLine]:
    """Lines that match, merged by time; the newest ``lines`` of them (0: all).

    Without a search, the end of each file is read and no more. A line without a time has that of the line above it.

    Raises
    ------
    OSError
        A log cannot be read.
    """
    # a search reads everything; else the end of each file is enough
    searches = wanted.grep is not None or wanted.since_s is not None
    limit = 0 if searches or lines == 0 else max(_LEAST_TAIL_BYTES, lines * _TAIL_BYTES_A_LINE)
    merged = heapq.merge(
        *(_read_file(file, wanted, limit) for file in find_log_files(run, wanted)), key=lambda line: line.time_s
    )
    return list(deque(merged, maxlen=lines)) if lines else list(merged)


def _read_file(file: LogFile, wanted: LogFilter, limit: int) -> Iterator[LogLine]:
    with file.path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if limit and size > limit:
            stream.seek(size - limit)
            stream.readline()  # the rest of a line
        yield from _lines(stream.read(), file, wanted, _Clock(file.path))


def _lines(data: bytes, file: LogFile, wanted: LogFilter, clock: _Clock) -> Iterator[LogLine]:
    for line in data.decode(errors="replace").splitlines():
        time_s = clock.time_of(line)
        if wanted.shows(line, time_s):
            yield LogLine(
                role=file.role, replica=file.replica, rank=file.rank, attempt=wanted.attempt, time_s=time_s, line=line
            )


class _Clock:
    """Times of the lines of one file: what a line says, else the time of the one before."""

    def __init__(self, path: Path) -> None:
        self._last_s = 0.0
        self._year = datetime.fromtimestamp(path.stat().st_mtime).year

    def time_of(self, line: str) -> float:
        if match := _ISO_TIME.match(line):
            text = f"{match[1]} {match[2]}.{match[3]}"
        elif match := _GLOG_TIME.match(line):
            text = f"{self._year}-{match[1]}-{match[2]} {match[3]}.{match[4]}"
        else:
            return self._last_s
        with contextlib.suppress(ValueError):  # digits that are no date
            # a file is in order, whatever the clocks of its writers say
            self._last_s = max(self._last_s, datetime.strptime(text, "%Y-%m-%d %H:%M:%S.%f").timestamp())
        return self._last_s


def follow_logs(run: RunDir, wanted: LogFilter, *, lines: int = 10, poll_s: float = _POLL_S) -> Iterator[LogLine]:
    """The newest ``lines``, then what is appended, until the run has ended.

    Files are opened anew at each look: an NFS client shows what others appended only after an open, and inotify
    says nothing there.
    """
    offsets = {file.path: file.path.stat().st_size for file in find_log_files(run, wanted)}
    clocks = {path: _Clock(path) for path in offsets}
    yield from read_logs(run, wanted, lines=lines)
    while True:
        ended = observe(run).state.ended
        fresh: list[LogLine] = []
        for file in find_log_files(run, wanted):
            clock = clocks.setdefault(file.path, _Clock(file.path))
            data = _appended(file.path, offsets, whole_lines=not ended)
            fresh.extend(_lines(data, file, wanted, clock))
        yield from sorted(fresh, key=lambda line: line.time_s)
        if ended:
            return
        time.sleep(poll_s)


def _appended(path: Path, offsets: dict[Path, int], *, whole_lines: bool) -> bytes:
    """What is new in a file since the last look; advances its offset."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        offset = offsets.get(path, 0)
        if size < offset:  # another file under the same name
            offset = 0
        stream.seek(offset)
        data = stream.read(size - offset)
    if whole_lines:
        data = data[: data.rfind(b"\n") + 1]
    offsets[path] = offset + len(data)
    return data


def format_line(line: LogLine, *, as_json: bool) -> str:
    """One line for a person (``role replica | text``) or for a program (a JSON object)."""
    if as_json:
        return msgspec.json.encode(line).decode()
    rank = f".{line.rank}" if line.rank else ""
    return f"{line.role} {line.replica}{rank} | {line.line}"
