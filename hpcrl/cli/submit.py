"""``hpcrl submit``: start a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.following import FollowOption, InJobOption, NewNameOption, QueueAnywayOption, follow_or_tell
from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption, TagOption
from hpcrl.cli.output import say
from hpcrl.cli.selection import RunsRootOption, ask_slurm, profile_roots, runs_root
from hpcrl.cli.sweep_submit import (
    AfterOption,
    GridOption,
    MaxRunningOption,
    RandomOption,
    SampleOption,
    SampleSeedOption,
    SeedsOption,
    check_tags,
    runs_after,
    submit_sweep,
)

if TYPE_CHECKING:
    from hpcrl.config.plan import Plan


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
            help="Start with the weights of another run: its newest checkpoint, that of a step, or a full version.",
        ),
    ] = None,
    follow: FollowOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the commands; change nothing.")] = False,
    in_job: InJobOption = False,
    queue_anyway: QueueAnywayOption = False,
    tags: TagOption = None,
    after: AfterOption = None,
    grid: GridOption = None,
    random: RandomOption = None,
    samples: SampleOption = None,
    sample_seed: SampleSeedOption = 0,
    seeds: SeedsOption = 1,
    max_running: MaxRunningOption = None,
    root: RunsRootOption = None,
) -> None:
    """Start a run of a recipe, or a sweep: a run for each value of --grid, each sample, each seed.

    Before the submit, Slurm is asked whether it could start the jobs: usable nodes, limits of partitions, and
    `sbatch --test-only`.

    --from starts with the weights of another run in place of model.path. If model.path exists, it must have the same
    shape. Optimizer, data order and counters begin anew.

    A sweep has the name --name, and its runs NAME-01, NAME-02, and so on: `hpcrl sweep status NAME`.

    Exit code with --follow: 0 completed, 1 failed, 93 given up without progress, 130 cancelled.
    """
    import os
    from pathlib import Path

    from hpcrl.cli.planning_layout import print_plan
    from hpcrl.cli.progress import working
    from hpcrl.config.load import load_cluster
    from hpcrl.errors import UsageError
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation
    from hpcrl.submit.prepare import prepare
    from hpcrl.submit.submission import check_vacant
    from hpcrl.sweeps.predecessors import jobs_to_wait_for
    from hpcrl.sweeps.preparing import SweepOptions, SweepRequest

    ask_slurm()
    labels, before = check_tags(tags or ()), runs_after(after or (), root)
    options = SweepOptions(
        grid=tuple(grid or ()),
        samples=tuple(samples or ()),
        count=random,
        sample_seed=sample_seed,
        seeds=seeds,
        max_running=max_running,
    )
    by_slurm = load_cluster(cluster).value.uses_slurm and not in_job
    jobs, waits_for = jobs_to_wait_for(before, by_slurm=by_slurm)
    if options.given or waits_for:
        _refuse_with_sweep(follow=follow, in_job=in_job)
        request = SweepRequest(
            recipe=recipe,
            cluster=cluster,
            overrides=tuple(overrides or ()),
            options=options,
            name=name,
            from_run=from_run,
            root=root,
            queue_anyway=queue_anyway,
        )
        submit_sweep(request, tags=labels, after=before, dry_run=dry_run)
        return
    if max_running is not None:
        raise UsageError("--max-running applies only to a sweep\n    hint: add --grid, --random or --seeds")
    with working("checking whether it would start"):
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
        say(f"copying the weights of {prepared.source.origin}", err=True)
    run = start(prepared, from_run=from_run, in_job=allocation, queue_anyway=queue_anyway, tags=labels, after=jobs)
    where = "" if allocation is None else f", inside of job {allocation.job_id}"
    say(f"submitted {run.name} in {run.path}{where}", err=True)
    follow_or_tell(run, follow)


def _refuse_with_sweep(*, follow: bool, in_job: bool) -> None:
    """Refuse options that are about one run (UsageError)."""
    from hpcrl.errors import UsageError

    if follow:
        raise UsageError(
            "--follow applies only to a single run\n    hint: hpcrl sweep status NAME --watch, or hpcrl sweep wait NAME"
        )
    if in_job:
        raise UsageError(
            "--in-job applies only to a single run that starts now\n    hint: leave it out, to submit separate jobs"
        )


def _name_unread_variables(plan: Plan, *, in_job: bool) -> None:
    """Print the variables of the shell that are not passed to sbatch."""
    import os

    from hpcrl.config.joined import unused_variables

    for variable in () if in_job or plan.layout.kind == "local" else unused_variables(os.environ):
        say(f"note: {variable} is ignored: sbatch gets its options from the plan (hpcrl plan)", err=True)
