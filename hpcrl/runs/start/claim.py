"""One command at a time: of several that would start the next attempt of a run, one does, and the others say so.

A claim is a file ``.resume.<n>`` in the run directory that is made whole by ``link`` and names its process. That of a
process that is dead, or of another machine and old, is overruled by the next number and not removed first, so that two
who find it dead cannot both take over.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId
from hpcrl.storage.files import atomic_create
from hpcrl.storage.msgspec_types import prepared

_PREFIX = ".resume."
_FORGOTTEN_S = 600.0
"""Time in seconds for which a claim by an unobservable process counts, longer than any submission."""


class _Claim(msgspec.Struct, frozen=True, kw_only=True):
    process: ProcessId
    time_s: float
    user: str

    @property
    def holds(self) -> bool:
        alive = self.process.alive()
        return time.time() - self.time_s < _FORGOTTEN_S if alive is None else alive

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time_s))
        return f"pid {self.process.pid} on {self.process.host}, {self.user}, since {when}"


@contextlib.contextmanager
def claimed(run: RunDir, *, user: str) -> Iterator[None]:
    """Claim the exclusive right to start an attempt of ``run``.

    Raises
    ------
    RunDirError
        Another process is at it; the message names it. Nothing was changed.
    """
    with claimed_directory(run.path, user=user, busy=lambda who: _busy(run, who)):
        yield


@contextlib.contextmanager
def claimed_directory(directory: Path, *, user: str, busy: Callable[[str], str]) -> Iterator[None]:
    """Claim a directory for this process alone.

    Parameters
    ----------
    busy:
        Returns the message of the refusal, from who has it.

    Raises
    ------
    RunDirError
        Another process has it. Nothing was changed.
    """
    path = _take(directory, user, busy)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _take(directory: Path, user: str, busy: Callable[[str], str]) -> Path:
    others = _claims(directory)
    _refuse(others, busy)
    path = directory / f"{_PREFIX}{max(others, default=0) + 1}"
    process = ProcessId.of(os.getpid())
    assert process is not None
    mine = _Claim(process=process, time_s=time.time(), user=user)
    try:
        atomic_create(path, msgspec.json.encode(mine))
    except FileExistsError:
        _refuse(_claims(directory), busy)
        raise RunDirError(busy("it has just ended")) from None
    others = {number: claim for number, claim in _claims(directory).items() if directory / f"{_PREFIX}{number}" != path}
    try:
        _refuse(others, busy)  # of two that begin at the same time at least one sees the other; both may give up
    except RunDirError:
        path.unlink(missing_ok=True)
        raise
    for number in others:
        (directory / f"{_PREFIX}{number}").unlink(missing_ok=True)
    return path


def _claims(directory: Path) -> dict[int, _Claim]:
    found = {}
    for name in os.listdir(directory):
        number = name.removeprefix(_PREFIX)
        if number != name and number.isdecimal():
            with contextlib.suppress(FileNotFoundError):
                found[int(number)] = msgspec.json.decode((directory / name).read_bytes(), type=prepared(_Claim))
    return found


def _refuse(claims: dict[int, _Claim], busy: Callable[[str], str]) -> None:
    for claim in claims.values():
        if claim.holds:
            raise RunDirError(busy(str(claim)))


def _busy(run: RunDir, who: str) -> str:
    return (
        f"another resume of {run.name} is under way ({who}); this one has changed nothing\n"
        f"    hint: see what it does: hpcrl status {reference(run)}"
    )
