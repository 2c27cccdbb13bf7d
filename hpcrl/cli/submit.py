"""``hpcrl submit``, ``resume`` and ``cancel``: what starts and ends runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption
from hpcrl.cli.selection import RunArgument, RunsRootOption, ask_slurm, find, runs_root

if TYPE_CHECKING:
    from rich.console import Console

    from hpcrl.runs.rundir import RunDir

__all__ = ["register"]

FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Show progress until the run has ended; Ctrl-C cancels the run.")
]


InJobOption = Annotated[
    bool,
    typer.Option(
        "--in-job", help="Run inside of the allocation of this shell (salloc), not in a job of its own; no requeue."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("submit")(submit)
    app.command("resume")(resume)
    app.command("cancel")(cancel)


def submit(
    recipe: RecipeArgument,
    cluster: ClusterOption = "local",
    name: Annotated[str | None, typer.Option("--name", "-n", metavar="RUN", help="Name of the run.")] = None,
    overrides: SetOption = None,
    follow: FollowOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the commands; change nothing.")] = False,
    in_job: InJobOption = False,
    root: RunsRootOption = None,
) -> None:
    """Start a run of a recipe.

    Exit code with --follow: 0 completed, 1 failed, 93 given up without progress, 130 cancelled.
    """
    import os
    import time
    from pathlib import Path

    from hpcrl.cli.planning import print_plan
    from hpcrl.config.joined import load_both, unused_variables
    from hpcrl.config.rules import check_rules
    from hpcrl.planning import (
        absolute_paths,
        absolute_site_paths,
        check_engine_flags,
        check_model,
        check_pythons,
        check_router,
        check_sizes,
        default_run_name,
        make_plan,
    )
    from hpcrl.runs.registry import check_name
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation

    loaded, site = load_both(recipe, cluster, overrides or (), environ=os.environ, in_job=in_job)
    check_rules(loaded, site)
    check_sizes(loaded, site)
    run_name = check_name(name) if name is not None else default_run_name(loaded.value, time.time())
    resolved = absolute_paths(loaded.value, Path.cwd())
    profile = absolute_site_paths(site.value, Path.cwd())
    plan = make_plan(resolved, profile, run_name, runs_root(root, profile) / run_name)
    if dry_run:
        print_plan(plan, site)
    allocation = find_allocation(plan, os.environ, SlurmClient()) if in_job else None
    if plan.layout.kind != "local" and not in_job:
        for variable in unused_variables(os.environ):
            typer.echo(f"note: {variable} is not read: the plan says what sbatch is told (hpcrl plan)", err=True)
    if loaded.value.job.payload == "roles":
        check_model(loaded, Path(resolved.model.path))
        check_pythons(plan, site)
        for note in [*check_router(loaded, plan), *check_engine_flags(loaded, plan)]:
            typer.echo(f"note: {note}", err=True)
    if dry_run:
        typer.echo("\nnothing was started or written (--dry-run)", err=True)
        return

    from hpcrl.slurm.submission import create_run, submit_attempt

    ask_slurm()
    provenance = {".".join(map(str, path)): origin for path, origin in loaded.origins.items()}
    run = create_run(resolved, profile, plan, provenance=provenance)
    submit_attempt(run, in_job=allocation)
    where = "" if allocation is None else f", inside of job {allocation.job_id}"
    typer.echo(f"submitted {run_name} in {run.path}{where}", err=True)
    _follow_or_tell(run, follow, root)


def resume(
    run: RunArgument,
    overrides: SetOption = None,
    follow: FollowOption = False,
    in_job: InJobOption = False,
    root: RunsRootOption = None,
) -> None:
    """Go on with a run that has ended, from its newest joint checkpoint.

    With --set its recipe changes first, for example to another number of trainer.ranks. Model, data and seed stay.
    With --in-job it goes on inside of the allocation of this shell, wherever it was before.

    Exit code with --follow: 0 completed, 1 failed, 93 given up without progress, 130 cancelled.
    """
    import os

    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation
    from hpcrl.slurm.submission import end_leftovers, prepare_resume, submit_attempt

    found = find(run, root)
    resumption = prepare_resume(found)
    for step, reason in resumption.skipped:
        typer.echo(f"checkpoint of step {step} is skipped: {reason}", err=True)
    if overrides:
        _change(found, overrides)
    allocation = find_allocation(found.plan(), os.environ, SlurmClient()) if in_job else None
    if swept := end_leftovers(found):
        typer.echo(f"ended {swept} processes that an earlier attempt had left behind", err=True)
    submit_attempt(found, in_job=allocation)
    start = "the beginning: there is no checkpoint" if resumption.step is None else f"step {resumption.step}"
    typer.echo(f"resumed {found.name} from {start}", err=True)
    _follow_or_tell(found, follow, root)


def _change(run: RunDir, overrides: list[str]) -> None:
    """Write the configuration of a run anew, with changes of its recipe."""
    from hpcrl.config.joined import for_job
    from hpcrl.config.load import Loaded
    from hpcrl.config.rules import check_rules
    from hpcrl.planning import change_recipe, make_plan

    loaded, changes = change_recipe(run.recipe_path, overrides)
    site = for_job(loaded, Loaded(run.cluster(), run.cluster_path, {}))
    check_rules(loaded, site)
    cluster = site.value
    run.write_configuration(loaded.value, cluster, make_plan(loaded.value, cluster, run.name, run.path))
    for change in changes:
        typer.echo(f"changed {change}", err=True)


def cancel(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Stop a run: its roles are asked in order, then killed. It can be resumed later."""
    import getpass

    from hpcrl.runs.observe import observe
    from hpcrl.slurm.submission import cancel as cancel_run

    found = find(run, root)
    view = observe(found)
    if not yes and not view.state.ended:
        roles = ", ".join(f"{c.role} {c.replica} (pid {c.pid})" for c in view.components if c.pid) or "no role yet"
        typer.echo(f"this stops {found.name} ({view.state}): {roles}", err=True)
        typer.confirm("stop it?", abort=True, err=True)
    view = cancel_run(found, user=getpass.getuser())
    typer.echo(f"{found.name}: {view.state}")


def _follow_or_tell(run: RunDir, follow: bool, root: str | None) -> None:
    import shlex

    from rich.console import Console

    option = f" --runs-root {shlex.quote(root)}" if root else ""
    if follow:
        raise typer.Exit(_follow(run, Console(stderr=True)))
    typer.echo(run.name)
    for command in ("status", "logs", "cancel"):
        extra = {"status": " --watch", "logs": " -f", "cancel": ""}[command]
        typer.echo(f"  hpcrl {command} {run.name}{extra}{option}", err=True)


def _follow(run: RunDir, console: Console) -> int:
    """Follow a run to its end and print the summary; returns the exit code."""
    from rich.console import Console as StandardOutput

    from hpcrl.errors import ExitCode, UsageError
    from hpcrl.runs.cause import CauseKind
    from hpcrl.runs.liveview import follow, summary
    from hpcrl.runs.metrics import read_metrics
    from hpcrl.runs.observe import read_progress
    from hpcrl.runs.report import write_report
    from hpcrl.runs.status import RunState
    from hpcrl.slurm.submission import interrupt

    view = follow(run, console, on_interrupt=lambda count: interrupt(run, count))
    metrics = read_metrics(run)
    picture = ""
    if metrics:
        try:
            picture = str(write_report(run))
        except UsageError as error:
            picture = f"none: {error}"
    StandardOutput().print(summary(view, read_progress(run), metrics, picture=picture))
    if view.state is RunState.COMPLETED:
        return ExitCode.OK
    typer.echo(f"  hpcrl why {run.name}\n  hpcrl resume {run.name}", err=True)
    if view.cause is not None and view.cause.kind is CauseKind.NO_PROGRESS:
        return ExitCode.NO_PROGRESS
    return ExitCode.CANCELLED if view.state is RunState.CANCELLED else ExitCode.FAILED
