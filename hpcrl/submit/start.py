"""From a prepared run to one that Slurm, or this machine, has been given."""

from __future__ import annotations

from dataclasses import replace

from hpcrl.config.cluster import SlurmCluster
from hpcrl.errors import Finding, HpcrlError
from hpcrl.runs.rundir import RunDir
from hpcrl.slurm.admission import check_admission, obstacles
from hpcrl.slurm.client import SlurmClient
from hpcrl.slurm.in_job import InJob
from hpcrl.slurm.reach import reachable_slurm
from hpcrl.submit.new_run import submit_new
from hpcrl.submit.prepare import PreparedRun
from hpcrl.submit.submission import check_vacant, create_run

__all__ = ["admit", "make_and_submit", "submit", "with_admission"]

_HINT = "ask for less, or for another partition; hpcrl submit --queue-anyway submits it all the same"


def submit(
    prepared: PreparedRun, *, from_run: str | None = None, in_job: InJob | None = None, queue_anyway: bool = False
) -> RunDir:
    """Start a prepared run: ask Slurm whether it could run, make its directory, and hand it over.

    Parameters
    ----------
    from_run:
        How the user named the run whose weights it begins with, for the record.
    in_job:
        The allocation to run in; None: jobs of its own.
    queue_anyway:
        Submit also what Slurm could not start as things are.

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
    return make_and_submit(prepared, from_run=from_run, in_job=in_job)


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


def make_and_submit(prepared: PreparedRun, *, from_run: str | None = None, in_job: InJob | None = None) -> RunDir:
    """Make the directory of an admitted run and hand it over; parameters and errors as of `submit`."""
    plan = prepared.planned()
    provenance = {".".join(map(str, path)): origin for path, origin in prepared.recipe.origins.items()}
    if prepared.source is not None:
        provenance["model.path"] = f"--from {from_run or prepared.source.origin}"
    made = create_run(prepared.resolved, prepared.profile, plan, provenance=provenance, source=prepared.source)
    submit_new(made, in_job=in_job)
    return made.run


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
    return isinstance(prepared.profile, SlurmCluster) and plan is not None and bool(plan.layout.components)
