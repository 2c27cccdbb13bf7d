"""The one writer of a ledger: entries in order, rollouts durable before they count.

A thread writes, so that an event loop never waits for a filesystem. What came while it wrote is written together: one
sync for the columns and one for the entries, however many rollouts finish at a time.
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
from typing import Any

import msgspec
from numpy.typing import NDArray

from hpcrl.dock.columns import encode_columns
from hpcrl.dock.ledger.entries import Begin, Dropped, Entry, Finished, PayloadPlace, believed_bytes, ledger_files
from hpcrl.dock.ledger.payload import PayloadWriter
from hpcrl.dock.warehouse.interface import Warehouse
from hpcrl.fs import fsync_dir, make_directory
from hpcrl.passing import patiently
from hpcrl.promise import promise

__all__ = ["RolloutLog"]

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class _Job:
    """One entry to write; where it has columns, it is made when these have their place."""

    entry: Entry | Callable[[PayloadPlace], Entry]
    pieces: Sequence[bytes | memoryview] | None
    done: Future[Entry]


class RolloutLog:
    """Appends to the ledger of a run.

    Attributes
    ----------
    ledger_dir, payload_dir:
        Where entries and columns lie.
    number:
        Of the file of this writer.
    """

    def __init__(
        self, rollouts_dir: Path, *, attempt: int, restored: int, limit_s: float, warehouse: Warehouse | None = None
    ) -> None:
        """Begin a file behind those that are there.

        Parameters
        ----------
        rollouts_dir:
            Of the run.
        attempt:
            Which writes.
        restored:
            The step that it goes on after.
        limit_s:
            How long a filesystem that refuses for a while (full, stale) is tried again, in seconds.
        warehouse:
            Gets a copy of the columns of finished rollouts, if there is room.

        Raises
        ------
        OSError
            The filesystem refused.
        """
        self.ledger_dir, self.payload_dir = rollouts_dir / "ledger", rollouts_dir / "payload"
        self._limit_s, self._warehouse = limit_s, warehouse
        for directory in (self.ledger_dir, self.payload_dir):
            make_directory(directory)
        self.number, self._fd = self._make_file()
        self._end = 0
        self._payload = PayloadWriter(self.payload_dir, self.number)
        self._unsettled = self._payload.file
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._lock, self._closed = threading.Lock(), False
        own = f"{self.number:06d}.jsonl"
        believed = believed_bytes(self.ledger_dir, but=own)
        begin = Begin(attempt=attempt, restored=restored, time_s=time.time(), believed=believed)
        self._write([_Job(begin, None, promise())])
        self._thread = threading.Thread(target=self._run, name="rollout-log", daemon=True)
        self._thread.start()

    def _make_file(self) -> tuple[int, int]:
        """A file with the next number; of two writers that begin at once each has its own."""
        while True:
            number = max((int(path.stem) for path in ledger_files(self.ledger_dir)), default=0) + 1
            with contextlib.suppress(FileExistsError):
                path = self.ledger_dir / f"{number:06d}.jsonl"
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                fsync_dir(self.ledger_dir)
                return number, fd

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
        """The first file of columns with any whose entries may not be durable yet."""
        return self._unsettled

    def close(self) -> None:
        """Write what was appended, and end; a filesystem that hangs is not waited for.

        What is appended afterwards fails at once: nobody would write it, and who waits for it would do so for ever.
        """
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("the ledger of rollouts is left as it is: the filesystem did not answer for %g s", _CLOSE_S)
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
                # what is behind a hole would not be believed either
                self._error = error
                for job in jobs:
                    if not job.done.done():
                        job.done.set_exception(error)

    def _next_jobs(self) -> tuple[list[_Job], bool]:
        """All that is there, at least one; and whether the end is among it."""
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
        blocks = [job.pieces for job in jobs if job.pieces is not None]
        places: list[PayloadPlace] = []
        if blocks:
            places = patiently(
                lambda: self._payload.write(blocks), limit_s=self._limit_s, what="keeping finished rollouts"
            )
        entries: list[Entry] = []
        for job in jobs:
            if callable(job.entry):
                entries.append(job.entry(places.pop(0)))
            else:
                entries.append(job.entry)
        lines = b"".join(_encoder.encode(entry) + b"\n" for entry in entries)
        patiently(lambda: self._append(lines), limit_s=self._limit_s, what="the ledger of rollouts")
        self._end += len(lines)
        for job, entry in zip(jobs, entries, strict=True):
            job.done.set_result(entry)
        self._unsettled = self._payload.file
        # last, because it may hang: a rollout that is durable has finished, and its place is another's. No batch has it
        # before its entry behind this one is written
        self._keep_in_memory(jobs, entries)

    def _keep_in_memory(self, jobs: Sequence[_Job], entries: Sequence[Entry]) -> None:
        if self._warehouse is None:
            return
        # whoever was told of these may have released them already
        dropped = {(each.group, member) for each in entries if isinstance(each, Dropped) for member in each.members}
        for job, entry in zip(jobs, entries, strict=True):
            # turns of rollouts in progress are read by nobody but the next process
            if isinstance(entry, Finished) and job.pieces is not None and (entry.group, entry.member) not in dropped:
                self._warehouse.put(entry.payload, job.pieces)

    def _append(self, lines: bytes) -> None:
        """Always at the same place, so that a second try leaves nothing half between two lines."""
        view, offset = memoryview(lines), self._end
        while view:
            written = os.pwrite(self._fd, view, offset)
            view, offset = view[written:], offset + written
        os.fsync(self._fd)
