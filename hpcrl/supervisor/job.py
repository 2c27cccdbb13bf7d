"""The callable that submitit runs, with plain arguments: the same on this machine and under Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from submitit.core.utils import DelayedSubmission

from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.in_job import InJob


@dataclass(frozen=True)
class Supervise:
    """Supervise the next attempt of the run in ``run_dir``.

    Everything else is read from there when it runs, so that it stays valid when Slurm requeues the job.
    """

    run_dir: str
    submission: int = 1
    """Number of the submission of the run, which the record may not have yet at the start."""
    in_job: InJob | None = None
    """The allocation that was there before; None: the job is the run's own."""

    def __call__(self) -> str:
        """Run the attempt. Returns ``COMPLETED``; any other end is an exception, so that the job fails, too.

        Raises
        ------
        RunFailedError
            The run failed or was cancelled; the message is the cause.
        RunDirError
            The directory is not a run, or another supervisor works in it.
        """
        # late: a process that only submits this object does not need the supervisor's imports
        from hpcrl.supervisor.supervise import supervise  # noqa: PLC0415

        return supervise(RunDir(Path(self.run_dir)), self.submission, self.in_job)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Import the supervisor on unpickling, before submitit handles signals that arrive meanwhile."""
        import_module("hpcrl.supervisor.supervise")
        self.__dict__.update(state)

    def checkpoint(self) -> DelayedSubmission:
        """Return the submission that submitit runs next.

        submitit calls it if Slurm's warning arrives before hpcrl handles signals itself.
        """
        return DelayedSubmission(self)
