"""One command at a time: of several that would start the next attempt of a run, one does, and the others say so.

A claim is a file ``.resume.<n>`` in the run directory that is made whole by ``link`` and names its process. That of a
process that is dead, or of another machine and old, is overruled by the next number and not removed first, so that two
who find it dead cannot both take over.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcrl.decoding import prepared
from hpcrl.errors import RunDirError
from hpcrl.fs import atomic_create
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId

__all__ = ["claimed"]

_PREFIX = ".resume."
_FORGOTTEN_S = 600.0
"""A claim of a process that cannot be seen from here counts for so long: no hand-over takes longer."""


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
    """Be the only one who starts an attempt of ``run``.

    Raises
    ------
    RunDirError
        Another process is at it; the message names it. Nothing was changed.
    """
    path = _take(run, user)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _take(run: RunDir, user: str) -> Path:
    others = _claims(run)
    _refuse(run, others)
    path = run.path / f"{_PREFIX}{max(others, default=0) + 1}"
    process = ProcessId.of(os.getpid())
    assert process is not None
    mine = _Claim(process=process, time_s=time.time(), user=user)
    try:
        atomic_create(path, msgspec.json.encode(mine))
    except FileExistsError:
        _refuse(run, _claims(run))
        raise RunDirError(_busy(run, "it has just ended")) from None
    others = {number: claim for number, claim in _claims(run).items() if run.path / f"{_PREFIX}{number}" != path}
    try:
        _refuse(run, others)  # of two that began at once at least one sees the other; both may give way
    except RunDirError:
        path.unlink(missing_ok=True)
        raise
    for number in others:
        (run.path / f"{_PREFIX}{number}").unlink(missing_ok=True)
    return path


def _claims(run: RunDir) -> dict[int, _Claim]:
    found = {}
    for name in os.listdir(run.path):
        number = name.removeprefix(_PREFIX)
        if number != name and number.isdecimal():
            with contextlib.suppress(FileNotFoundError):
                found[int(number)] = msgspec.json.decode((run.path / name).read_bytes(), type=prepared(_Claim))
    return found


def _refuse(run: RunDir, claims: dict[int, _Claim]) -> None:
    for claim in claims.values():
        if claim.holds:
            raise RunDirError(_busy(run, str(claim)))


def _busy(run: RunDir, who: str) -> str:
    return (
        f"another resume of {run.name} is under way ({who}); this one has changed nothing\n"
        f"    hint: see what it does: hpcrl status {reference(run)}"
    )
