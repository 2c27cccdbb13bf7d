"""Making a sweep: its record, and the directories of all its members, before one of them is started.

The names of members are taken, the recipe is fixed, and a full disk is noticed while nothing runs yet. Where a member
cannot be made, nothing of the sweep is left. A process that is killed meanwhile leaves a record that is not ``made``:
the next submit of this name removes what belongs to it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from hpcrl.errors import RunDirError
from hpcrl.runs.known import forget
from hpcrl.runs.record import Labels, SweepMember, user_name
from hpcrl.runs.rundir import RunDir
from hpcrl.runs.status import ProcessId
from hpcrl.storage import lost_replies
from hpcrl.submit.start import make_run_directory
from hpcrl.sweeps.preparing import PreparedSweep
from hpcrl.sweeps.sweep_files import PlannedMember, SweepDir, SweepRecord
from hpcrl.sweeps.unmade import is_vacant, unmade_runs


def make_sweep(
    prepared: PreparedSweep,
    *,
    max_running: int | None = None,
    tags: Sequence[str] = (),
    after: Iterable[RunDir] = (),
    from_run: str | None = None,
) -> SweepDir:
    """Make a sweep with all its members; starts nothing.

    Parameters
    ----------
    max_running:
        Maximum number of members that run at a time; None: one of a local sweep, any number on Slurm.
    tags:
        Tags of the members in addition to the name of the sweep.
    after:
        Runs whose end the members wait for.
    from_run:
        As of `hpcrl.submit.start.submit`.

    Raises
    ------
    ConfigError
        Members have problems. Nothing was written.
    RunDirError
        There is a sweep or a run of this name.
    OSError
        The filesystem refuses. Nothing of the sweep is left.
    """
    prepared.refuse()
    sweep, first = prepared.sweep, prepared.runs[0]
    _clear(sweep)
    record = SweepRecord(
        sweep_id=SweepRecord.new_id(),
        name=prepared.name,
        created_at_s=time.time(),
        user=user_name(),
        cwd=str(Path.cwd()),
        argv=list(sys.argv),
        recipe=first.recipe.value.name,
        cluster=first.site.value.name,
        executor="slurm" if prepared.uses_slurm else "local",
        max_running=max_running or (None if prepared.uses_slurm else 1),
        after=[str(run.path.resolve()) for run in after],
        members=list(prepared.members),
        maker=ProcessId.of(os.getpid()),
    )
    try:
        sweep.create(record)
    except FileExistsError:  # another process took the name meanwhile
        raise RunDirError(_occupied(sweep)) from None
    made: list[RunDir] = []
    try:
        for member, run in zip(prepared.members, prepared.runs, strict=True):
            labels = Labels((prepared.name, *tags), _place(sweep, record, member))
            made.append(make_run_directory(run, labels, from_run=from_run).run)
        sweep.write(msgspec.structs.replace(record, made=True, maker=None))
    except BaseException:
        _discard(made)
        sweep.remove()
        raise
    return sweep


def check_sweep_vacant(sweep: SweepDir) -> None:
    """Refuse the name of a sweep that exists (RunDirError); remains of one do not count."""
    if not is_vacant(sweep):
        raise RunDirError(_occupied(sweep))


def _clear(sweep: SweepDir) -> None:
    """Remove what a killed process left of a sweep of this name (RunDirError where there is a whole one)."""
    check_sweep_vacant(sweep)
    if not sweep.path.exists():
        return
    _discard(unmade_runs(sweep))
    sweep.remove()


def _place(sweep: SweepDir, record: SweepRecord, member: PlannedMember) -> SweepMember:
    """Return what the record of a member says about its sweep."""
    return SweepMember(
        sweep=record.name,
        sweep_id=record.sweep_id,
        directory=str(sweep.path),
        number=member.number,
        values=member.values,
    )


def _discard(runs: Iterable[RunDir]) -> None:
    """Remove runs that were never started: their names are free at once."""
    for run in runs:
        forget(run)
        doomed = run.path.with_name(f".removed-{run.name}-{uuid.uuid4().hex}")
        lost_replies.rename(run.path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _occupied(sweep: SweepDir) -> str:
    return (
        f"the sweep {sweep.name} exists in {sweep.path}\n"
        f"    hint: see it: hpcrl sweep status {sweep.name}; continue it: hpcrl sweep resume {sweep.name}\n"
        "    hint: --name with another name"
    )
