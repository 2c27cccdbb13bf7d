"""Runs whose end others wait for: as jobs that Slurm knows, or as runs that a queue has to watch."""

from __future__ import annotations

from collections.abc import Iterable

from hpcrl.errors import RunDirError
from hpcrl.runs.observe import observe
from hpcrl.runs.record import RunRecord
from hpcrl.runs.rundir import RunDir
from hpcrl.sweeps.member_views import is_gone


def jobs_to_wait_for(runs: Iterable[RunDir], *, by_slurm: bool) -> tuple[list[int], str]:
    """Return the jobs that a new job depends on; or in words what Slurm cannot wait for.

    Parameters
    ----------
    runs:
        Those that have ended, and those that were removed, are left out; one that cannot be read may run.
    by_slurm:
        The new run is a job, which can depend on others.
    """
    jobs = []
    for run in runs:
        try:
            view, record = observe(run), RunRecord.read(run)
        except (RunDirError, OSError):
            if is_gone(run.path):
                continue
            return [], f"the end of {run.name} (its directory cannot be read)"
        if view.state.ended:
            continue
        newest = record.submissions[-1] if record.submissions else None
        if not by_slurm or newest is None or newest.executor != "slurm":
            return [], f"the end of {run.name} ({view.state})"
        jobs.append(int(newest.job_id))
    return jobs, ""
