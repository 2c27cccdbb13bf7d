"""Files of step records: ``metrics/0001.jsonl`` of an attempt, continued in ``metrics/0001-0002.jsonl`` and so on.

A part that has become long is continued in the next one and sealed (`hpcrl.storage.sealed_files`), in runs whose record
says so: earlier versions, which would not find its steps, refuse these runs. The newest part of an attempt is never
sealed, and no part of another attempt. Paths and positions are those without compression.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from hpcrl.errors import RunDirError
from hpcrl.reporting.reports import Outage, ReportedFile, ReportedLines
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.storage.sealed_files import SUFFIX, content_from, remove_remains, seal_file, sealed_path

_log = logging.getLogger(__name__)
_PART = re.compile(r"(\d{4,})(?:-(\d{4,}))?\.jsonl")
PART_BYTES = 1 << 20
"""Size of a part in bytes from which on the next one continues it: some hundred steps."""
_LISTINGS = 3
"""Maximum looks for parts: one that is sealed while its directory is listed may be in the list in neither form."""
_MAX_READ = 16 << 20
"""Maximum bytes that are read of a part at once."""


def part_path(run: RunDir, attempt: int, part: int = 1) -> Path:
    """Return the plain path of a part of an attempt's records; parts count from 1."""
    return run.metrics_dir / (f"{attempt:04d}.jsonl" if part == 1 else f"{attempt:04d}-{part:04d}.jsonl")


def metrics_parts(run: RunDir, attempt: int | None = None) -> list[Path]:
    """Return the plain paths of the parts of all attempts (or of one) in their order, whether they are sealed or not.

    Raises
    ------
    OSError
        The directory exists and cannot be read.
    """
    for _ in range(_LISTINGS):
        numbers = _listed(run.metrics_dir)
        if not _has_gaps(numbers.values()):
            break
    chosen = (name for name, (of, _) in numbers.items() if attempt in (None, of))
    return [run.metrics_dir / name for name in sorted(chosen, key=lambda name: (*numbers[name], name))]


def _listed(directory: Path) -> dict[str, tuple[int, int]]:
    """Return attempt and part of the files of a directory by their plain names."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return {}
    # while a part is being sealed, both forms exist
    plain = {name.removesuffix(SUFFIX) for name in names if name.endswith((".jsonl", f".jsonl{SUFFIX}"))}
    return {name: _numbers(name) for name in plain if not name.startswith(".")}


def _has_gaps(numbers: Collection[tuple[int, int]]) -> bool:
    """Return whether a part is missing before the newest one of its attempt."""
    newest: dict[int, int] = {}
    for attempt, part in numbers:
        newest[attempt] = max(part, newest.get(attempt, 0))
    return sum(newest.values()) > sum(1 for _, part in numbers if part)


def _numbers(name: str) -> tuple[int, int]:
    """Return attempt and part of a file by its plain name; zeros for another name."""
    match = _PART.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else (0, 0)


class MetricsLines:
    """Lines of the records of an attempt, in parts; they are reports (`hpcrl.reporting.reports`).

    Parameters
    ----------
    part_bytes:
        Size from which on the next part continues a part; None: the usual one, where the run's record allows parts.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        *,
        on_caught_up: Callable[[Outage], None] | None = None,
        part_bytes: int | None = None,
    ) -> None:
        self._run, self._attempt, self._on_caught_up = run, attempt, on_caught_up
        self._part_bytes = part_bytes
        if part_bytes is None and _may_have_parts(run):
            self._part_bytes = PART_BYTES
        self._part, self._bytes = self._newest_part()
        self._lines = self._open()

    def append(self, line: bytes) -> None:
        """Add a line, given without its newline."""
        # while a line waits for the filesystem, none may come behind it in another file: readers would miss it
        if self._part_bytes is not None and self._bytes >= self._part_bytes and self._lines.is_written:
            self._lines.close()
            self._part, self._bytes = self._part + 1, 0
            self._lines = self._open()
            _EndedParts(self._run, self._attempt, self._part).put(b"")
        self._lines.append(line)
        self._bytes += len(line) + 1

    def flush(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds until all lines are written; return whether they are."""
        return self._lines.flush(timeout_s)

    def close(self) -> None:
        """Let go of the file once all is written."""
        self._lines.close()

    def _open(self) -> ReportedLines:
        path = part_path(self._run, self._attempt, self._part)
        return ReportedLines(path, on_caught_up=self._on_caught_up)

    def _newest_part(self) -> tuple[int, int]:
        """Return the part that an earlier process of this attempt has written last, and its size; or the first."""
        try:
            parts = metrics_parts(self._run, self._attempt)
            if not parts:
                return 1, 0
            number = _numbers(parts[-1].name)[1]
            try:
                return number, parts[-1].stat().st_size
            except FileNotFoundError:
                return number + 1, 0  # it is sealed: that process was killed before the first line of the next part
        except OSError:
            # a number behind all others: what exists may be sealed, and nothing may be written in its place
            return int(time.time()), 0


def _may_have_parts(run: RunDir) -> bool:
    try:
        return RunRecord.read(run).allows_parts
    except (OSError, RunDirError):
        return False


class _EndedParts(ReportedFile):
    """Report that seals the parts of an attempt before its newest one; it is not tried again before the next part."""

    def __init__(self, run: RunDir, attempt: int, newest: int) -> None:
        super().__init__(sealed_path(part_path(run, attempt, newest - 1)))
        self._run, self._attempt, self._newest = run, attempt, newest

    def _write(self, data: list[bytes]) -> None:
        try:
            remove_remains(self._run.metrics_dir)
            for path in metrics_parts(self._run, self._attempt):
                if _numbers(path.name)[1] < self._newest and path.is_file():
                    seal_file(path, size=path.stat().st_size)
        except OSError as error:
            _log.warning("records of steps are not compressed now: %s", error)
        data.clear()


class MetricsTail:
    """Reads the lines of records that are new, each once, in the order of attempts and parts."""

    def __init__(self, run: RunDir, attempt: int | None = None) -> None:
        """Begin with the first line of all attempts, or of one."""
        self._run, self._attempt = run, attempt
        self._offsets: dict[Path, int] = {}
        self._ended: set[Path] = set()

    def lines(self) -> Iterator[bytes]:
        """Yield the whole lines behind those that were read before; a torn last line waits for its end."""
        parts = metrics_parts(self._run, self._attempt)
        for path, following in zip(parts, [*parts[1:], None], strict=False):
            while path not in self._ended:
                try:
                    data = content_from(path, self._offsets.get(path, 0), _MAX_READ)
                except FileNotFoundError:
                    return  # not visible here yet: lines of later parts would come before those of this one
                end = data.rfind(b"\n") + 1
                self._offsets[path] = self._offsets.get(path, 0) + end
                yield from (line for line in data[:end].split(b"\n") if line)
                if len(data) < _MAX_READ or not end:
                    break
            # nothing is appended to a part that another one of its attempt continued before it was read
            if following is not None and _numbers(following.name)[0] == _numbers(path.name)[0]:
                self._ended.add(path)
