"""Members of a sweep as they are now: by their own records, whatever started them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from hpcrl.runs.observe import RunView, observe_all
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import RunState
from hpcrl.sweeps.sweep_files import PlannedMember, SweepDir, SweepRecord


class MemberView(NamedTuple):
    """Member of a sweep.

    Attributes
    ----------
    run:
        Its run directory.
    record, view:
        None where the run was removed, or cannot be read.
    unreadable:
        It is there and cannot be read now: it may run.
    """

    member: PlannedMember
    run: RunDir
    record: RunRecord | None = None
    view: RunView | None = None
    unreadable: bool = False

    @property
    def submissions(self) -> int:
        """Return how often it was started."""
        return 0 if self.record is None else len(self.record.submissions)

    @property
    def submitted_at_s(self) -> float:
        """Return when it was started last, in seconds since the epoch; 0 where it was not."""
        return self.record.submissions[-1].submitted_at_s if self.record is not None and self.submissions else 0.0

    @property
    def job_id(self) -> int | None:
        """Return its newest Slurm job; None where it has none."""
        newest = self.record.submissions[-1] if self.record is not None and self.submissions else None
        return int(newest.job_id) if newest is not None and newest.executor == "slurm" else None

    @property
    def alive(self) -> bool:
        """Return whether it was started and has not ended."""
        return self.view is not None and self.view.state is not RunState.QUEUED and not self.view.state.ended

    @property
    def is_completed(self) -> bool:
        """Return whether it has done all its steps."""
        return self.view is not None and self.view.state is RunState.COMPLETED

    def is_due(self, target: int) -> bool:
        """Return whether it is to be started now, where it gets ``target`` submissions altogether."""
        if self.record is None or self.view is None or self.record.withdrawn is not None:
            return False
        if self.record.queued:
            return True
        return self.submissions < target and self.view.state.ended and not self.is_completed


def view_members(sweep: SweepDir, record: SweepRecord) -> list[MemberView]:
    """Return all members in their order; Slurm is asked about all of them at once."""
    runs = [sweep.run_of(member) for member in record.members]
    found = {run.path: (run_record, view) for run, run_record, view in observe_all(runs)}
    views = []
    for member, run in zip(record.members, runs, strict=True):
        if run.path not in found:
            views.append(MemberView(member, run, unreadable=not is_gone(run.path)))
            continue
        run_record, view = found[run.path]
        # another run may have the name of one that was removed
        own = run_record.sweep is not None and run_record.sweep.sweep_id == record.sweep_id
        views.append(MemberView(member, run, run_record, view) if own else MemberView(member, run))
    return views


def is_gone(path: Path) -> bool:
    """Return whether a directory is certainly not there; a filesystem that refuses to answer does not say so."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
