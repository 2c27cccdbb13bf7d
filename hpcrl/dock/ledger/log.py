"""The one writer of a ledger: entries in order, rollouts durable before they count.

A thread writes, so that an event loop never waits for a filesystem. What came while it wrote is written together: one
sync for the columns and one for the entries, however many rollouts finish at a time. A file that has become long is
continued in a further one, and sealed (`hpcrl.dock.ledger.sealer`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from numpy.typing import NDArray

from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.entries import (
    FIRST_FORMAT,
    FORMAT_VERSION,
    Begin,
    Dropped,
    Entry,
    Finished,
    PayloadPlace,
    file_number,
    ledger_files,
    trusted_prefix_bytes,
)
from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.dock.ledger.sealer import LedgerSealer
from hpcrl.processes.uncancellable_future import promise
from hpcrl.storage.files import fsync_dir, make_directory
from hpcrl.storage.retry import retry_transient
from hpcrl.storage.sealed_files import sealed_path

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
FILE_BYTES = 4 << 20
"""Size of a file of entries in bytes from which on a further one continues it: the newest is not compressed."""
_encoder = msgspec.json.Encoder()


class ColumnsCopies(Protocol):
    """A second place for columns, after the ledger's files; the warehouse is one (`hpcrl.dock.warehouse`)."""

    def put(self, place: PayloadPlace, pieces: Sequence[bytes | memoryview]) -> bool:
        """Keep a block, given in pieces; return False where it does not fit."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One entry to write; where it has columns, it is made when these have their place."""

    entry: Entry | Callable[[PayloadPlace], Entry]
    pieces: Sequence[bytes | memoryview] | None
    done: Future[Entry]


class RolloutLog:
    """Writer of the ledger of a run.

    Attributes
    ----------
    ledger_dir, payload_dir:
        Directories of entries and columns.
    number:
        Number of the file that is written.
    """

    def __init__(
        self,
        rollouts_dir: Path,
        *,
        attempt: int,
        restored: int,
        limit_s: float,
        warehouse: ColumnsCopies | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Begin a file after the existing ones.

        Parameters
        ----------
        rollouts_dir:
            Directory of the run's rollouts.
        attempt:
            Attempt that writes.
        restored:
            The restored step.
        limit_s:
            Maximum seconds of retries of a filesystem that refuses temporarily (full, stale).
        warehouse:
            Gets a copy of the columns of finished rollouts, if there is room.
        file_bytes:
            Size of a file of entries from which on a further one continues it.

        Raises
        ------
        OSError
            The filesystem refused.
        """
        self.ledger_dir, self.payload_dir = rollouts_dir / "ledger", rollouts_dir / "payload"
        self._attempt, self._restored = attempt, restored
        self._limit_s, self._warehouse = limit_s, warehouse
        for directory in (self.ledger_dir, self.payload_dir):
            make_directory(directory)
        self.number, self._fd = self._make_file()
        self._end, self._file_bytes, self._full_at = 0, file_bytes, file_bytes
        self._payload = PayloadWriter(self.payload_dir, self.number)
        self._unsettled = self._payload.file
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._lock, self._closed = threading.Lock(), False
        begin = self._begin(trusted_prefix_bytes(self.ledger_dir, but=self._file))
        self._write([_Job(begin, None, promise())])
        self._sealer = LedgerSealer(self.ledger_dir, lambda: self._file)
        self._thread = threading.Thread(target=self._run, name="rollout-log", daemon=True)
        self._thread.start()

    @property
    def _file(self) -> str:
        return f"{self.number:06d}.jsonl"

    def _begin(self, believed: dict[str, int], continues: int = 0) -> Begin:
        return Begin(
            attempt=self._attempt,
            restored=self._restored,
            time_s=time.time(),
            believed=believed,
            # earlier versions would not find a file that is sealed, and would restore where one is continued
            format_version=FORMAT_VERSION if believed else FIRST_FORMAT,
            continues=continues,
        )

    def _make_file(self) -> tuple[int, int]:
        """Make a file with the next number; two writers that start at the same time get different files."""
        while True:
            number = max((file_number(path.name) for path in ledger_files(self.ledger_dir)), default=0) + 1
            path = self.ledger_dir / f"{number:06d}.jsonl"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            except FileExistsError:
                continue
            try:
                # this process stood still since it looked: others have used the number, and have sealed their file
                if sealed_path(path).name in os.listdir(self.ledger_dir):
                    path.unlink()
                    os.close(fd)
                    continue
                fsync_dir(self.ledger_dir)
            except OSError:
                os.close(fd)
                raise
            return number, fd

    def _continue_in_next_file(self) -> None:
        """Begin a further file behind this one, all entries of which are durable.

        Raises
        ------
        OSError
            The first entry of the further file was not written, or whether it is durable is unknown. No entry may
            follow in either file: where it is durable, later entries of this one are not believed.
        """
        try:
            number, fd = self._make_file()
        except OSError as error:
            # an empty file does not count: this one is continued, and the next look is after as many bytes
            _log.warning("the ledger of rollouts stays in one file for now: %s", error)
            self._full_at = self._end + self._file_bytes
            return
        line = _encoder.encode(self._begin({self._file: self._end}, continues=self.number)) + b"\n"
        try:
            self._write_lines(fd, line, 0)
        except BaseException:
            os.close(fd)
            raise
        before, self._fd = self._fd, fd
        self.number, self._end, self._full_at = number, len(line), self._file_bytes
        with contextlib.suppress(OSError):  # all of it is durable
            os.close(before)
        self._sealer.look()

    def append(self, entry: Entry) -> Future[Entry]:
        """Write an entry; the future is done when it is durable (OSError where it cannot be written)."""
        return self._put(_Job(entry, None, promise()))

    def finish(
        self, about: bytes, arrays: Mapping[str, NDArray[Any]], entry: Callable[[PayloadPlace], Entry]
    ) -> Future[Entry]:
        """Write columns, and then the entry that says where they lie; the future as that of `append`.

        ``about`` and ``arrays`` are those of `hpcrl.dock.columns.encode_columns` (ValueError as there, at once).
        """
        return self._put(_Job(entry, encode_columns(about, arrays), promise()))

    @property
    def oldest_unsettled(self) -> str:
        """Return the first file of columns with any whose entries may not be durable yet."""
        return self._unsettled

    def close(self) -> None:
        """Write what was appended, and end; a filesystem that hangs is not waited for.

        A later append fails at once: it would never be written, and its caller would wait without end.
        """
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._sealer.close()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("the ledger of rollouts was not closed: the filesystem did not answer for %g s", _CLOSE_S)
            return
        self._payload.close()
        os.close(self._fd)

    def _put(self, job: _Job) -> Future[Entry]:
        with self._lock:
            error = OSError("the ledger of rollouts is closed") if self._closed else self._error
            if error is None:
                self._queue.put(job)
        if error is not None:
            job.done.set_exception(error)
        return job.done

    def _run(self) -> None:
        ended = False
        while not ended:
            jobs, ended = self._next_jobs()
            if not jobs:
                continue
            try:
                if self._error is not None:
                    raise self._error
                self._write(jobs)
            except BaseException as error:  # noqa: BLE001 - raised to those that wait
                # entries after a gap would not be trusted either
                self._error = error
                for job in jobs:
                    if not job.done.done():
                        job.done.set_exception(error)

    def _next_jobs(self) -> tuple[list[_Job], bool]:
        """Return all jobs that wait, at least one, and whether the end is among them."""
        jobs: list[_Job] = []
        job = self._queue.get()
        while job is not None:
            jobs.append(job)
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                return jobs, False
        return jobs, True

    def _write(self, jobs: Sequence[_Job]) -> None:
        if self._end >= self._full_at:
            self._continue_in_next_file()
        blocks = [job.pieces for job in jobs if job.pieces is not None]
        places: list[PayloadPlace] = []
        if blocks:
            places = retry_transient(
                lambda: self._payload.write(blocks), limit_s=self._limit_s, what="keeping finished rollouts"
            )
        entries: list[Entry] = []
        for job in jobs:
            if callable(job.entry):
                entries.append(job.entry(places.pop(0)))
            else:
                entries.append(job.entry)
        lines = b"".join(_encoder.encode(entry) + b"\n" for entry in entries)
        self._write_lines(self._fd, lines, self._end)
        self._end += len(lines)
        for job, entry in zip(jobs, entries, strict=True):
            job.done.set_result(entry)
        self._unsettled = self._payload.file
        # last, because it may hang: a durable rollout has finished, and another one takes its place. A batch gets it
        # only after its entry behind this one is written
        self._keep_in_memory(jobs, entries)

    def _write_lines(self, fd: int, lines: bytes, offset: int) -> None:
        what = "the ledger of rollouts"
        retry_transient(lambda: _write_at(fd, lines, offset), limit_s=self._limit_s, what=what)

    def _keep_in_memory(self, jobs: Sequence[_Job], entries: Sequence[Entry]) -> None:
        if self._warehouse is None:
            return
        # callers that were notified of these may have released them already
        dropped = {(each.group, member) for each in entries if isinstance(each, Dropped) for member in each.members}
        for job, entry in zip(jobs, entries, strict=True):
            # turns of rollouts in progress are read only by the next process
            if isinstance(entry, Finished) and job.pieces is not None and (entry.group, entry.member) not in dropped:
                self._warehouse.put(entry.payload, job.pieces)


def _write_at(fd: int, lines: bytes, offset: int) -> None:
    """Write ``lines`` durably at a known end, so that a second try leaves no partial line between two lines."""
    view = memoryview(lines)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
    os.fsync(fd)
