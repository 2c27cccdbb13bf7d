"""Comparing files with a manifest: several at a time, within a deadline, with a word on what differs."""

from __future__ import annotations

import errno
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import xxhash

from hpcrl.errors import DeadlineError
from hpcrl.storage.files import FileRecord

_THREADS = 8
"""Files that are read at a time."""
_READ_BLOCK_BYTES = 8 << 20
_STALE_RETRIES = 3


def damaged_files(
    directory: Path,
    files: Mapping[str, FileRecord],
    *,
    content: bool = True,
    deadline_s: float | None = None,
) -> list[str]:
    """Return a sentence for each file that is missing, cannot be read, or differs from its record; by name.

    Parameters
    ----------
    directory:
        Directory to which names are relative.
    files:
        Records by name.
    content:
        True reads the files; False compares only sizes.
    deadline_s:
        Longest time in seconds. A read that hangs is left behind in its thread.

    Raises
    ------
    DeadlineError
        It took too long; nothing is known.
    """
    deadline = None if deadline_s is None else time.monotonic() + deadline_s
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in sorted(files, key=lambda name: -files[name].bytes):
        waiting.put(name)
    answers: queue.SimpleQueue[tuple[str, str | BaseException]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers.put((name, _problem(directory / name, name, files[name], content, deadline)))
            except BaseException as error:  # noqa: BLE001 - raised by the caller of damaged_files
                answers.put((name, error))

    for _ in range(min(_THREADS, len(files))):
        # daemons: a read that hangs on a dead server must not keep the process
        threading.Thread(target=work, name="verify", daemon=True).start()
    problems: dict[str, str] = {}
    for _ in files:
        try:
            name, answer = answers.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise _too_late(directory) from None
        if isinstance(answer, BaseException):
            raise answer
        problems[name] = answer
    return [problems[name] for name in sorted(problems) if problems[name]]


def share_of(files: Mapping[str, FileRecord], rank: int, world_size: int) -> dict[str, FileRecord]:
    """Return the files that ``rank`` verifies where ``world_size`` ranks share the work: about equal bytes for each.

    Each rank computes the shares from the same ``files`` (of a manifest, by name), and each file belongs to one rank:
    the shares need no message between ranks.
    """
    loads = [0] * world_size
    mine: dict[str, FileRecord] = {}
    for name, record in sorted(files.items(), key=lambda item: (-item[1].bytes, item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += record.bytes
        if lightest == rank:
            mine[name] = record
    return mine


def _problem(path: Path, name: str, record: FileRecord, content: bool, deadline: float | None) -> str:
    """Return a description of the problem of one file; empty where there is none."""
    for attempt in range(_STALE_RETRIES):
        try:
            size = path.stat().st_size
            if size != record.bytes:
                return f"{name} has {size} bytes, the manifest says {record.bytes}"
            if content and (found := _hash(path, deadline)) != record.xxh3_128:
                return (
                    f"{name} does not have the content that the manifest says "
                    f"(XXH3-128 {found}, the manifest says {record.xxh3_128})"
                )
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            # the server has the file under another handle now: opening it again helps
            if error.errno == errno.ESTALE and attempt < _STALE_RETRIES - 1:
                continue
            return f"{name} cannot be read: {error.strerror or error}"
        return ""
    raise AssertionError("unreachable")


def _hash(path: Path, deadline: float | None) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_READ_BLOCK_BYTES):
            digest.update(block)
            if deadline is not None and time.monotonic() > deadline:
                raise _too_late(path)
    return digest.hexdigest()


def _too_late(path: Path) -> DeadlineError:
    return DeadlineError(
        f"{path} could not be compared with its manifest within the timeout\n"
        "    hint: a longer checkpoint.verify_timeout_s, or checkpoint.verify: sizes"
    )
