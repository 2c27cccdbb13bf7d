"""Log files of a run: which there are, merged by time, followed."""

from __future__ import annotations

import heapq
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from hpcrl.errors import UsageError
from hpcrl.reporting.screen_text import visible, without_colours
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.views.log_clock import LogClock
from hpcrl.runs.views.log_lines import file_blocks, split_lines, tail_start

SUPERVISOR = "supervisor"
"""Value in place of a role in filters: the supervisor's own log, which submitit keeps."""

_POLL_S = 0.3
_NAME = re.compile(r"(\d+)-(\d+)\.log")
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LEAST_TAIL_BYTES = 1 << 20
_LOOK_BYTES = 1 << 22
"""Maximum bytes of a file that are read at one poll while it is followed."""


class LogFile(NamedTuple):
    """Log file, and the role, replica and rank that wrote it."""

    path: Path
    role: str
    replica: int
    rank: int

    @property
    def label(self) -> str:
        """Return the name, ``engine 0`` or ``trainer 0.1`` (rank 1)."""
        return f"{self.role} {self.replica}" + (f".{self.rank}" if self.rank else "")


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """Line of a log, with the role, replica and rank that wrote it.

    Attributes
    ----------
    time_s:
        Time of the line, or of the nearest earlier line that has one; 0 where none has.
    line:
        Text without the line break.
    """

    role: str
    replica: int
    rank: int
    attempt: int
    time_s: float
    line: str


class LogFilter(NamedTuple):
    """Filter of log lines; None does not restrict.

    Attributes
    ----------
    newest:
        Whether the attempt was chosen because it was the newest one: following continues with the next attempt.
    """

    attempt: int
    role: str | None = None
    replica: int | None = None
    rank: int | None = None
    grep: re.Pattern[str] | None = None
    since_s: float | None = None
    newest: bool = False

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
        """Return a filter for the options of a command.

        ``role`` may also name a replica (``engine/0``); ``since`` is an age (``10m``) or a time (``2026-01-31 12:00``).

        Raises
        ------
        UsageError
            The attempt or role does not exist, ``grep`` is not a regular expression, or ``since`` is not a time.
        """
        attempts, newest = run.attempts(), attempt is None
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
            raise UsageError(f"--grep {grep!r} is not a regular expression: {error}") from error
        return cls(attempt, role, replica, rank, pattern, None if since is None else _since_s(since), newest)

    def is_old(self, time_s: float) -> bool:
        """Return whether a line is too old to be shown; a line with an unknown time (0) never is."""
        return self.since_s is not None and 0.0 < time_s < self.since_s

    def takes(self, file: LogFile) -> bool:
        """Return whether lines of this file are wanted."""
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
    """Return an age (``90s``, ``10m``, ``2h``, ``1d``) or a local time as seconds since the epoch.

    Raises
    ------
    UsageError
        The text is neither.
    """
    if match := _AGE.fullmatch(text):
        return time.time() - float(match[1]) * _UNITS_S[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise UsageError(
            f"--since {text!r} is not a time\n    hint: an age as 90s, 10m, 2h, 1d; or 2026-01-31T12:00"
        ) from error


def find_log_files(run: RunDir, wanted: LogFilter) -> list[LogFile]:
    """Log files that match, in order of role, replica and rank."""
    if wanted.role == SUPERVISOR:
        return _supervisor_files(run, wanted.attempt)
    files = []
    for path in (run.attempt_dir(wanted.attempt) / "logs").glob("*/*.log"):
        # a pipe of that name would block its reader
        if (match := _NAME.fullmatch(path.name)) and path.is_file():
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
    """Return lines that match, merged by time; the newest ``lines`` of them (0: all, see `iterate_logs`).

    Without a search, the end of each file is read and no more. A line without a time has that of the line above it.

    Raises
    ------
    OSError
        A log cannot be read.
    """
    return list(iterate_logs(run, wanted, lines=lines))


def iterate_logs(
    run: RunDir,
    wanted: LogFilter,
    *,
    lines: int = 0,
    ends: Mapping[Path, int] | None = None,
    most_bytes: int | None = None,
) -> Iterator[LogLine]:
    """Yield what `read_logs` returns, as it is read: logs of any size need no more memory than their newest lines.

    Parameters
    ----------
    ends:
        End of the part of each file that is read; the end of the file by default.
    most_bytes:
        Maximum bytes that are read, of all files together: the newest of each; None: no limit.
    """
    # a search reads everything; else the end of each file is enough
    tail = 0 if wanted.grep is not None or wanted.since_s is not None else lines
    files = find_log_files(run, wanted)
    most = None if most_bytes is None else most_bytes // max(1, len(files))
    readers = (
        _read_file(file, wanted, tail, None if ends is None else ends.get(file.path), files=len(files), most=most)
        for file in files
    )
    merged = heapq.merge(*readers, key=lambda line: line.time_s)
    return iter(deque(merged, maxlen=lines)) if lines else merged


def _read_file(
    file: LogFile, wanted: LogFilter, tail: int, end: int | None, *, files: int, most: int | None
) -> Iterator[LogLine]:
    if tail:
        begin = tail_start(file.path, tail, least_bytes=_LEAST_TAIL_BYTES // files, most_bytes=most)
    else:
        begin = 0 if most is None else tail_start(file.path, 0, least_bytes=most, most_bytes=most)
    blocks = file_blocks(file.path, begin, end=end, files=files)
    return _lines(blocks, file, wanted, LogClock(file.path))


def _lines(blocks: Iterable[bytes], file: LogFile, wanted: LogFilter, clock: LogClock) -> Iterator[LogLine]:
    for found in split_lines(blocks, wanted.grep):
        time_s = clock.time_of(found.text)
        if found.matches and not wanted.is_old(time_s):
            yield LogLine(
                role=file.role,
                replica=file.replica,
                rank=file.rank,
                attempt=wanted.attempt,
                time_s=time_s,
                line=found.text,
            )


def follow_logs(run: RunDir, wanted: LogFilter, *, lines: int = 10, poll_s: float = _POLL_S) -> Iterator[LogLine]:
    """Yield the newest ``lines``, then what is appended, until the run has ended.

    Without a requested attempt, following continues with each next one; else it ends with that attempt. Files are
    opened again at each poll: an NFS client shows what others appended only after an open, and inotify reports nothing
    there.
    """
    offsets = {file.path: file.path.stat().st_size for file in find_log_files(run, wanted)}
    clocks = {path: LogClock(path) for path in offsets}
    yield from iterate_logs(run, wanted, lines=lines, ends=offsets)
    while True:
        # asked before files are read, so that everything written before the end is in them
        ended, newest = observe(run).state.ended, max(run.attempts(), default=wanted.attempt)
        last = ended or newest > wanted.attempt
        fresh: list[LogLine] = []
        more = False
        for file in find_log_files(run, wanted):
            clock = clocks.setdefault(file.path, LogClock(file.path))
            data, left = _appended(file.path, offsets, whole_lines=not last)
            more = more or left
            fresh.extend(_lines([data], file, wanted, clock))
        yield from sorted(fresh, key=lambda line: line.time_s)
        if more:
            continue
        if newest > wanted.attempt and wanted.newest:
            wanted = wanted._replace(attempt=min(n for n in run.attempts() if n > wanted.attempt))
        elif last:
            return
        else:
            time.sleep(poll_s)


def _appended(path: Path, offsets: dict[Path, int], *, whole_lines: bool) -> tuple[bytes, bool]:
    """Return new lines of a file since the last poll, and whether there are more; advance its offset."""
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        offset = offsets.get(path, 0)
        if size < offset:  # another file under the same name
            offset = 0
        stream.seek(offset)
        data = stream.read(min(size - offset, _LOOK_BYTES))
    left = offset + len(data) < size
    if whole_lines or left:
        end = data.rfind(b"\n") + 1
        # a line that is longer than the bytes of one poll is read in parts
        data = data[:end] if end or not left else data
    offsets[path] = offset + len(data)
    return data, left


def format_line(line: LogLine, *, as_json: bool) -> str:
    """Format a line for a person (``role replica | text``, without colours) or for a program (a JSON object)."""
    if as_json:
        return msgspec.json.encode(line).decode()
    rank = f".{line.rank}" if line.rank else ""
    return f"{line.role} {line.replica}{rank} | {visible(without_colours(line.line))}"
