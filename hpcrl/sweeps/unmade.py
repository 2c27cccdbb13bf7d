"""Remains of a sweep: the record and members of a submit that was killed, or a record whose runs were removed."""

from __future__ import annotations

from hpcrl.errors import RunDirError
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.sweeps.sweep_files import SweepDir, SweepRecord


def is_unmade(record: SweepRecord) -> bool:
    """Return whether the process that made a sweep was killed before all members had their directories."""
    return not record.made and record.maker is not None and record.maker.alive() is False


def is_vacant(sweep: SweepDir) -> bool:
    """Return whether the name of a sweep is free: it was never made whole, or all of its runs were removed."""
    if not sweep.record_path.is_file():
        return True
    record = sweep.read()
    return is_unmade(record) or (record.made and not any(sweep.run_of(each).path.exists() for each in record.members))


def unmade_runs(sweep: SweepDir) -> list[RunDir]:
    """Return members of a sweep that was never made whole; none of another one, or where there is no sweep."""
    try:
        record = sweep.read()
    except RunDirError:
        return []
    if not is_unmade(record):
        return []
    return [run for run in map(sweep.run_of, record.members) if _is_unstarted(run, record)]


def _is_unstarted(run: RunDir, sweep: SweepRecord) -> bool:
    try:
        record = RunRecord.read(run)
    except RunDirError:
        return False
    return record.sweep is not None and record.sweep.sweep_id == sweep.sweep_id and not record.submissions
