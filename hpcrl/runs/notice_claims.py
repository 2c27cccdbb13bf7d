"""One file for each fact and notifier: who makes it may send the message, and no other process ever does.

A file is made exclusively before a try. It stays when the message was sent, was refused, or may have been sent; it is
removed where a try has certainly not sent it, so that also another attempt of the run may try again. A supervisor that
is killed in the middle of a try leaves a file without an outcome: that message is not sent again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hpcrl.runs.rundir import RunDir
from hpcrl.storage.files import atomic_write

Outcome = Literal["", "sent", "failed", "unknown", "held_back", "old"]


class Claim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Contents of such a file.

    Attributes
    ----------
    time_s:
        When it was written.
    attempt:
        Attempt that tried to send it.
    event, title:
        As of the message.
    outcome:
        Empty during a try.
    why:
        Reason of what is not ``sent``.
    tries:
        Number of tries until then.
    """

    time_s: float
    attempt: int
    event: str
    title: str
    outcome: Outcome = ""
    why: str = ""
    tries: int = 1


class Claims:
    """The files of one notifier in a run. Errors of the filesystem are raised as they are."""

    def __init__(self, run: RunDir, notifier: str) -> None:
        """Nothing is read or made."""
        self.directory = claims_dir(run) / notifier

    def since_s(self) -> float:
        """Return when this notifier began to watch the run (seconds since the epoch); at the first time, now."""
        path = self.directory / ".since"
        self.directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError, ValueError):
            return float(path.read_text())
        now = time.time()
        atomic_write(path, str(now).encode())
        return now

    def take(self, key: str, claim: Claim) -> bool:
        """Make the file of a fact; False where it exists."""
        try:
            fd = os.open(self._path(key), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as stream:
            stream.write(msgspec.json.encode(claim))
            stream.flush()
            # before the message leaves: after a power failure it must not be sent once more
            os.fsync(stream.fileno())
        return True

    def settle(self, key: str, claim: Claim) -> None:
        """Write the outcome."""
        atomic_write(self._path(key), msgspec.json.encode(claim))

    def release(self, key: str) -> None:
        """Remove the file: the message has certainly not been sent."""
        self._path(key).unlink(missing_ok=True)

    def known(self) -> dict[str, Claim]:
        """Return all files by key; one that cannot be read counts as a try that was cut off."""
        found: dict[str, Claim] = {}
        with contextlib.suppress(FileNotFoundError):
            for path in self._files():
                try:
                    found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Claim)
                except FileNotFoundError:
                    continue
                except msgspec.DecodeError:
                    found[path.stem] = Claim(time_s=path.stat().st_mtime, attempt=0, event="", title="")
        return found

    def _files(self) -> Iterator[Path]:
        yield from sorted(path for path in self.directory.glob("*.json") if not path.name.startswith("."))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


def claims_dir(run: RunDir) -> Path:
    """Return the directory with those of all notifiers."""
    return run.sinks_dir / "notices"


def read_claims(run: RunDir) -> list[tuple[str, str, Claim]]:
    """Return all messages of a run by time: notifier, key, and what became of it."""
    directory = claims_dir(run)
    names = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
    found = [(name, key, claim) for name in names for key, claim in Claims(run, name).known().items()]
    return sorted(found, key=lambda each: each[2].time_s)
