"""Copies of a run directory: a run id stands for one directory, and a copy has that of its original.

Processes and jobs are known by the run id. What is done to a copy must never reach those of the original, so a copy is
known as one: its record says where the run was made or last handed over, and a run with the same id lies there. Where
none does, the directory was moved.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.runs.known import remember
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir


def original_of(run: RunDir, record: RunRecord, planned: str | None = None) -> Path | None:
    """Return the directory of the run that this one is a copy of; None where it is the run itself, moved or not.

    Parameters
    ----------
    planned:
        Directory by its ``plan.json``, where the caller has read that: records of earlier versions do not contain it.
    """
    place = record.run_dir or (_planned(run) if planned is None else planned)
    if not os.path.isabs(place) or _same(place, run.path):
        return None
    with contextlib.suppress(RunDirError, OSError):
        if RunRecord.read(RunDir(Path(place))).run_id == record.run_id:
            return Path(place)
    return None


def with_own_identity(run: RunDir, record: RunRecord) -> RunRecord:
    """Return the record of a run that is about to be submitted here, written where it has changed.

    A copy becomes a run of its own: it gets a new id and its own name, and loses the submissions of the original. For a
    directory that was moved the record's path is updated.
    """
    here = str(run.path.resolve())
    if original_of(run, record) is not None:
        record = msgspec.structs.replace(record, run_id=RunRecord.new_id(), name=run.name, submissions=[], run_dir=here)
    elif record.run_dir != here:
        record = msgspec.structs.replace(record, run_dir=here)
    else:
        return record
    record.write(run)
    remember(run, record.run_id)
    return record


def belongs_elsewhere(place: str, run_dir: Path) -> bool:
    """Return whether a process that was started for a run in ``place`` belongs to another run than that in ``run_dir``.

    A directory that was moved no longer exists at its old place, and does not count.
    """
    return bool(place) and not _same(place, run_dir) and RunDir(Path(place)).record_path.is_file()


def _planned(run: RunDir) -> str:
    with contextlib.suppress(OSError, RunDirError):
        return run.names().run_dir
    return ""


def _same(place: str, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(place, path)
    return os.path.realpath(place) == os.path.realpath(path)
