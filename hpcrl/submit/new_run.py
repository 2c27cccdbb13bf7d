"""The first submission of a run that was just made: where Slurm refuses it, nothing is left of the run."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence

from hpcrl.runs.contents import RunContents
from hpcrl.runs.known import forget
from hpcrl.runs.record import Submission
from hpcrl.runs.registry import reference
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.errors import (
    NoClusterError,
    SlurmAnswerError,
    SlurmError,
    SlurmMissingError,
    SubmitUnclearError,
)
from hpcrl.slurm.in_job import InJob
from hpcrl.slurm.replica_jobs import cancel_all
from hpcrl.storage import lost_replies
from hpcrl.submit.submission import submit_attempt


def submit_new(contents: RunContents, *, in_job: InJob | None = None, after: Sequence[int] = ()) -> Submission:
    """Submit a run that was not submitted yet, like `hpcrl.submit.submission.submit_attempt`.

    Raises
    ------
    SlurmError
        Slurm refused a job of it, or is not here: jobs that it had taken before are cancelled, and the run is gone, so
        that its name is free and the next try reads the site's profile anew. Or it is not known whether Slurm has a job
        of it: then the run is kept, and the message says how to go on.
    """
    try:
        return submit_attempt(contents, in_job=in_job, after=after)
    except SlurmError as error:
        unclear = isinstance(error, SubmitUnclearError | SlurmAnswerError)
        if not unclear and _withdraw(contents):
            raise
        kept = type(error)(_how_to_go_on(contents.run, error))
        raise kept from error


def _withdraw(contents: RunContents) -> bool:
    """Cancel what Slurm has of a run, and remove it; returns whether that could be done."""
    try:
        cancel_all(SlurmClient(), contents.record.run_id)
    except (SlurmMissingError, NoClusterError):
        pass  # without commands nothing was submitted
    except SlurmError:
        return False
    run = contents.run
    forget(run)
    # the name is free at once, however long the removal takes
    doomed = run.path.with_name(f".removed-{run.name}-{uuid.uuid4().hex}")
    lost_replies.rename(run.path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def _how_to_go_on(run: RunDir, error: SlurmError) -> str:
    named = reference(run)
    return (
        f"{error}\n"
        f"    hint: the run is kept in {run.path}; when Slurm answers: hpcrl resume {named} (it finds its jobs)\n"
        f"    hint: or cancel its jobs: hpcrl cancel {named}"
    )
