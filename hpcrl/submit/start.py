"""From a prepared run to one that Slurm, or this machine, has been given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcrl.config.cluster import SlurmCluster
from hpcrl.errors import Finding, HpcrlError
from hpcrl.runs.contents import RunContents
from hpcrl.runs.record import Labels
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.admission import check_admission, obstacles
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.in_job import InJob
from hpcrl.slurm.reach import reachable_slurm
from hpcrl.submit.new_run import submit_new
from hpcrl.submit.prepare import PreparedRun
from hpcrl.submit.submission import check_vacant, create_run

_HINT = "ask for less, or for another partition; hpcrl submit --queue-anyway submits it all the same"


def submit(
    prepared: PreparedRun,
    *,
    from_run: str | None = None,
    in_job: InJob | None = None,
    queue_anyway: bool = False,
    tags: Sequence[str] = (),
    after: Sequence[int] = (),
) -> RunDir:
    """Start a prepared run: ask Slurm whether it could run, make its directory, and hand it over.

    Parameters
    ----------
    from_run:
        The user's name for the run whose weights it begins with, for the record.
    in_job:
        The allocation to run in; None: jobs of its own.
    queue_anyway:
        Submit even if Slurm could not start the job now.
    tags:
        Words by which the user finds the run.
    after:
        Slurm jobs whose end it waits for.

    Raises
    ------
    ConfigError
        The run has problems.
    UsageError
        Slurm could not start it. Nothing was written.
    RunDirError
        There is a run of this name.
    hpcrl.slurm.errors.SlurmError
        Slurm does not answer, or refuses a job; see `hpcrl.submit.new_run.submit_new`.
    """
    admit(prepared, in_job=in_job is not None, queue_anyway=queue_anyway)
    return make_and_submit(prepared, from_run=from_run, in_job=in_job, tags=tags, after=after)


def admit(
    prepared: PreparedRun, *, in_job: bool = False, queue_anyway: bool = False, client: SlurmClient | None = None
) -> None:
    """Refuse a run whose name is taken, or that Slurm could not start; Slurm must answer. Raises as `submit`."""
    plan = prepared.planned()
    check_vacant(plan.run_dir)
    if _needs_slurm(prepared) and not in_job:
        assert isinstance(prepared.profile, SlurmCluster)
        reached = reachable_slurm(client)
        if not queue_anyway:
            check_admission(plan, prepared.profile, reached)


def make_and_submit(
    prepared: PreparedRun,
    *,
    from_run: str | None = None,
    in_job: InJob | None = None,
    tags: Sequence[str] = (),
    after: Sequence[int] = (),
) -> RunDir:
    """Make the directory of an admitted run and hand it over; parameters and errors as of `submit`."""
    made = make_run_directory(prepared, Labels(tuple(tags)), from_run=from_run)
    submit_new(made, in_job=in_job, after=after)
    return made.run


def make_run_directory(prepared: PreparedRun, labels: Labels, *, from_run: str | None = None) -> RunContents:
    """Make the directory of an admitted run and start nothing; parameters and errors as of `submit`."""
    plan = prepared.planned()
    provenance = {".".join(map(str, path)): origin for path, origin in prepared.recipe.origins.items()}
    if prepared.source is not None:
        provenance["model.path"] = f"--from {from_run or prepared.source.origin}"
    return create_run(
        prepared.resolved, prepared.profile, plan, provenance=provenance, source=prepared.source, labels=labels
    )


def with_admission(prepared: PreparedRun) -> PreparedRun:
    """Return a run with what Slurm says against it among its problems; a run that has problems is left as it is."""
    if prepared.plan is None or prepared.problems or not _needs_slurm(prepared):
        return prepared
    assert isinstance(prepared.profile, SlurmCluster)
    try:
        reasons = [(what, _HINT) for what in obstacles(prepared.plan, prepared.profile, reachable_slurm())]
    except HpcrlError as error:
        what, _, hint = str(error).partition("\n    hint: ")
        reasons = [(what, hint)]
    where = str(prepared.site.source)
    return replace(prepared, problems=tuple(Finding(where, "job", what, hint) for what, hint in reasons))


def _needs_slurm(prepared: PreparedRun) -> bool:
    """Return whether the run takes jobs of its own."""
    plan = prepared.plan
    return prepared.profile.uses_slurm and plan is not None and bool(plan.layout.components)
