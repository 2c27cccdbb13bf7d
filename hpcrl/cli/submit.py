"""``hpcrl submit``: start a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.following import FollowOption, InJobOption, NewNameOption, QueueAnywayOption, follow_or_tell
from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunsRootOption, ask_slurm, profile_roots, runs_root

if TYPE_CHECKING:
    from hpcrl.config.plan import Plan

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("submit")(submit)


def submit(
    recipe: RecipeArgument,
    cluster: ClusterOption = "local",
    name: NewNameOption = None,
    overrides: SetOption = None,
    from_run: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP|@vN]",
            help="Begin with the weights of another run: its newest checkpoint, that of a step, or a full version.",
        ),
    ] = None,
    follow: FollowOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the commands; change nothing.")] = False,
    in_job: InJobOption = False,
    queue_anyway: QueueAnywayOption = False,
    root: RunsRootOption = None,
) -> None:
    """Start a run of a recipe.

    Slurm is asked first whether it would ever start the jobs: nodes that can be used, limits of partitions, and what
    `sbatch --test-only` says.

    With --from the start model is what another run has learned, in place of model.path, which must be of the same
    shape where it is there; optimizer, data order and counters begin anew.

    Exit code with --follow: 0 completed, 1 failed, 93 given up without progress, 130 cancelled.
    """
    import os
    from pathlib import Path

    from hpcrl.cli.planning_layout import print_plan
    from hpcrl.cli.progress import working
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation
    from hpcrl.submit.prepare import prepare
    from hpcrl.submit.submission import check_vacant

    ask_slurm()
    with working("looking whether it would start"):
        prepared = prepare(
            recipe,
            cluster,
            overrides or (),
            environ=os.environ,
            cwd=Path.cwd(),
            name=name,
            root=lambda profile: runs_root(root, profile),
            from_run=from_run,
            roots=profile_roots if root is None else None,
            in_job=in_job,
        )
    if dry_run and prepared.plan is not None:
        print_plan(prepared.plan, prepared.site, commands=True)
    for note in prepared.notes:
        say(f"note: {note}", err=True)
    plan = prepared.planned()
    allocation = find_allocation(plan, os.environ, SlurmClient()) if in_job else None
    _name_unread_variables(plan, in_job=in_job)
    if dry_run:
        check_vacant(plan.run_dir)
        say("\nnothing was started or written (--dry-run)", err=True)
        return

    from hpcrl.submit.start import submit as start

    if prepared.source is not None:
        say(f"taking the weights of {prepared.source.origin}", err=True)
    run = start(prepared, from_run=from_run, in_job=allocation, queue_anyway=queue_anyway)
    where = "" if allocation is None else f", inside of job {allocation.job_id}"
    say(f"submitted {run.name} in {run.path}{where}", err=True)
    follow_or_tell(run, follow)


def _name_unread_variables(plan: Plan, *, in_job: bool) -> None:
    """Say which variables of the shell sbatch is not told about."""
    import os

    from hpcrl.config.joined import unused_variables

    for variable in () if in_job or plan.layout.kind == "local" else unused_variables(os.environ):
        say(f"note: {variable} is not read: the plan says what sbatch is told (hpcrl plan)", err=True)
