"""``hpcrl submit``, ``resume`` and ``cancel``: what starts and ends runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hpcrl.cli.options import ClusterOption, RecipeArgument, SetOption, confirm
from hpcrl.cli.selection import RunArgument, RunsRootOption, ask_slurm, find, profile_roots, runs_root

if TYPE_CHECKING:
    from rich.console import Console

    from hpcrl.config.cluster import ClusterProfile
    from hpcrl.config.load import Loaded
    from hpcrl.config.plan import Plan
    from hpcrl.config.recipe import Recipe
    from hpcrl.runs.rundir import RunDir
    from hpcrl.runs.start.restart import ResumePoint
    from hpcrl.runs.start.resume import Begin

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
    queue_anyway: Annotated[
        bool, typer.Option("--queue-anyway", help="Submit also what Slurm could not start as things are.")
    ] = False,
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
    import time
    from pathlib import Path

    from hpcrl.cli.planning import print_plan
    from hpcrl.config.joined import load_both
    from hpcrl.config.rules.table import check_rules
    from hpcrl.jobplan import (
        absolute_paths,
        absolute_site_paths,
        check_model,
        check_secrets,
        check_sizes,
        default_run_name,
        make_plan,
        with_model_of,
    )
    from hpcrl.runs.registry import check_name
    from hpcrl.runs.start.origin import START_MODEL, find_source
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation

    loaded, site = load_both(recipe, cluster, overrides or (), environ=os.environ, in_job=in_job)
    source = None
    if from_run is not None:
        source = find_source(from_run, runs_root(root, site.value), profile_roots if root is None else None)
        loaded = with_model_of(loaded, source.config_dir, named=str(source.origin))
    check_rules(loaded, site)
    check_sizes(loaded, site)
    run_name = check_name(name) if name is not None else default_run_name(loaded.value, time.time())
    resolved = absolute_paths(loaded.value, Path.cwd())
    profile = absolute_site_paths(site.value, Path.cwd())
    run_dir = runs_root(root, profile) / run_name
    if source is not None:
        model = resolved.model.model_copy(update={"path": str(run_dir / START_MODEL)})
        resolved = resolved.model_copy(update={"model": model})
    plan = make_plan(resolved, profile, run_name, run_dir)
    if dry_run:
        print_plan(plan, site, commands=True)
    allocation = find_allocation(plan, os.environ, SlurmClient()) if in_job else None
    _name_unread_variables(plan, in_job=in_job)
    check_secrets(plan, site)
    if loaded.value.job.payload == "roles":
        check_model(loaded, Path(resolved.model.path) if source is None else source.config_dir)
        _check_programs(loaded, site, plan)
    if dry_run:
        typer.echo("\nnothing was started or written (--dry-run)", err=True)
        return

    from hpcrl.submit.new_run import submit_new
    from hpcrl.submit.submission import create_run

    ask_slurm()
    _ask_whether_it_could_start(plan, profile, wanted=not (queue_anyway or in_job))
    provenance = {".".join(map(str, path)): origin for path, origin in loaded.origins.items()}
    if source is not None:
        typer.echo(f"taking the weights of {source.origin}", err=True)
        provenance["model.path"] = f"--from {from_run}"
    run = create_run(resolved, profile, plan, provenance=provenance, source=source)
    submit_new(run, in_job=allocation)
    where = "" if allocation is None else f", inside of job {allocation.job_id}"
    typer.echo(f"submitted {run_name} in {run.path}{where}", err=True)
    _follow_or_tell(run, follow)


def _name_unread_variables(plan: Plan, *, in_job: bool) -> None:
    """Say which variables of the shell sbatch is not told about."""
    import os

    from hpcrl.config.joined import unused_variables

    for variable in () if in_job or plan.layout.kind == "local" else unused_variables(os.environ):
        typer.echo(f"note: {variable} is not read: the plan says what sbatch is told (hpcrl plan)", err=True)


def _ask_whether_it_could_start(plan: Plan, profile: ClusterProfile, *, wanted: bool) -> None:
    """Refuse what Slurm could not start (UsageError with the reasons), where that is wanted."""
    from hpcrl.cli.slurm import reachable_slurm
    from hpcrl.config.cluster import SlurmCluster
    from hpcrl.slurm.admission import check_admission

    if wanted and isinstance(profile, SlurmCluster) and plan.layout.components:
        check_admission(plan, profile, reachable_slurm())


def _check_programs(recipe: Loaded[Recipe], site: Loaded[ClusterProfile], plan: Plan) -> None:
    """Check what roles will execute: interpreters, environments of the user's own, the router, flags of engines."""
    from hpcrl.cli.progress import working
    from hpcrl.jobplan import check_engine_flags, check_pythons, check_router
    from hpcrl.jobplan.environment_trial import check_environments

    check_pythons(plan, site)
    with working("trying the recipe's environments"):
        tried = check_environments(recipe, plan, site.value)
    notes = [*tried, *check_router(recipe, plan)]
    for note in [*notes, *check_engine_flags(recipe, plan)]:
        typer.echo(f"note: {note}", err=True)


def resume(
    run: RunArgument,
    overrides: SetOption = None,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Begin at step 0 with the start model; what there is is put aside."),
    ] = False,
    from_step: Annotated[
        int | None,
        typer.Option("--from-step", metavar="STEP", help="Go on from this checkpoint; later ones are put aside."),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="With job.on_change: stop, run what is there now all the same."),
    ] = False,
    follow: FollowOption = False,
    in_job: InJobOption = False,
    root: RunsRootOption = None,
) -> None:
    """Go on with a run that has ended, from its newest joint checkpoint that is found good.

    With --set its recipe changes first, for example to another number of trainer.ranks, or to more trainer.steps, also
    of a run that is completed. Model, data and seed stay. The trainer compares checkpoints with their manifests and
    says what it restored (hpcrl status). A run that has saved checkpoints never begins again by itself. With --in-job
    it goes on inside of the allocation of this shell, wherever it was before.

    Exit code: 2 the run is alive, another resume is at it, or there is nothing to do; 94 no checkpoint can be restored;
    in these cases nothing was changed. With --follow also 0 completed, 1 failed, 93 given up without progress, 130
    cancelled.
    """
    import os

    from hpcrl.errors import RunDirError, UsageError
    from hpcrl.runs.record import user_name
    from hpcrl.runs.start.claim import claimed
    from hpcrl.runs.start.resume import Begin, request_restart
    from hpcrl.runs.start.snapshot import keep_snapshot, take_snapshot
    from hpcrl.slurm.client import SlurmClient
    from hpcrl.slurm.in_job import find_allocation
    from hpcrl.submit.submission import end_leftovers, prepare_resume, submit_attempt

    if from_scratch and from_step is not None:
        raise UsageError("--from-scratch and --from-step exclude each other")
    found, begin = find(run, root), Begin(scratch=from_scratch, step=from_step)
    try:
        with claimed(found, user=user_name()):
            change = _plan_change(found, overrides) if overrides else _renewal(found)
            wanted = found.plan() if change is None else change.plan
            allocation = find_allocation(wanted, os.environ, SlurmClient()) if in_job else None
            point = prepare_resume(found, begin, steps=change.recipe.trainer.steps if change and overrides else None)
            for step, reason in point.skipped:
                typer.echo(f"checkpoint of step {step} is skipped: {reason}", err=True)
            _say_changes(found, accept=accept_changes)
            _try_environments(found, change)
            if change is not None:
                change.write(found)
            keep_snapshot(found, take_snapshot(found, found.recipe(), found.plan()))
            request_restart(found, begin)
            if swept := end_leftovers(found):
                typer.echo(f"ended {swept} processes that an earlier attempt had left behind", err=True)
            submit_attempt(found, in_job=allocation)
    except RunDirError as error:
        if not overrides:
            raise
        raise RunDirError(f"{error}\n    changed nothing: --set {' --set '.join(overrides)}") from error
    typer.echo(_what_it_tries(found, begin, point), err=True)
    _follow_or_tell(found, follow)


def _try_environments(run: RunDir, change: _Change | None) -> None:
    """Import and make environments of one's own as the next attempt will (ConfigError where one cannot be made)."""
    from hpcrl.cli.progress import working
    from hpcrl.config.load import Loaded
    from hpcrl.jobplan.environment_trial import check_environments

    recipe, cluster, plan = (run.recipe(), run.cluster(), run.plan()) if change is None else change[:3]
    with working("trying the recipe's environments"):
        notes = check_environments(Loaded(recipe, run.recipe_path, {}), plan, cluster)
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _say_changes(run: RunDir, *, accept: bool) -> None:
    """Say what the run would run that it did not before; refuse where the recipe says so (RunDirError)."""
    from hpcrl.errors import RunDirError
    from hpcrl.runs.registry import reference
    from hpcrl.runs.start.snapshot import changes_since_submit

    changes = changes_since_submit(run)
    if changes and run.recipe().job.on_change == "stop" and not accept:
        raise RunDirError(
            f"{run.name} would run something else than before, and job.on_change is stop; nothing was changed\n"
            + "".join(f"  {change}\n" for change in changes)
            + f"    hint: bring back what it was (copies and the diff are in {run.snapshots_dir})\n"
            f"    hint: hpcrl resume {reference(run)} --accept-changes"
        )
    for change in changes:
        typer.echo(f"changed since it was last submitted: {change}", err=True)


def _what_it_tries(run: RunDir, begin: Begin, point: ResumePoint) -> str:
    """What a resume can say before the trainer has verified anything."""
    from hpcrl.runs.registry import reference

    if begin.scratch:
        return f"resumed {run.name}: it begins again at step 0, and what it has saved is put aside"
    if point.step is None:
        return f"resumed {run.name}: it begins at step 0, as it has saved no checkpoint yet"
    return (
        f"resumed {run.name}: the trainer verifies the checkpoint of step {point.step} and goes on from it; "
        f"what it restored: hpcrl status {reference(run)}"
    )


class _Change(NamedTuple):
    """The configuration of a run anew, before it is written."""

    recipe: Recipe
    cluster: ClusterProfile
    plan: Plan
    lines: list[str]

    def write(self, run: RunDir) -> None:
        run.write_configuration(self.recipe, self.cluster, self.plan)
        for line in self.lines:
            typer.echo(f"changed {line}", err=True)


def _plan_change(run: RunDir, overrides: list[str]) -> _Change:
    """The configuration of a run with changes of its recipe; nothing is written."""
    from hpcrl.config.joined import for_job
    from hpcrl.config.load import Loaded
    from hpcrl.config.rules.table import check_rules
    from hpcrl.jobplan import change_recipe, make_plan

    loaded, lines = change_recipe(run.recipe_path, overrides)
    site = for_job(loaded, Loaded(run.cluster(), run.cluster_path, {}))
    check_rules(loaded, site)
    return _Change(loaded.value, site.value, make_plan(loaded.value, site.value, run.name, run.path), lines)


def _renewal(run: RunDir) -> _Change | None:
    """A new plan for a run that was planned before servers were told to want the run's token; None for others."""
    from hpcrl.credentials import TOKEN_FILE

    if (run.path / TOKEN_FILE).exists():
        return None
    change = _plan_change(run, [])
    return change._replace(lines=["plan: servers of the run answer those alone who bring its token"])


def cancel(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    root: RunsRootOption = None,
) -> None:
    """Stop a run: its roles are asked in order, then killed. It can be resumed later."""
    import getpass

    from hpcrl.runs.observe import observe
    from hpcrl.submit.submission import cancel as cancel_run

    found = find(run, root)
    view = observe(found)
    if not yes and not view.state.ended:
        roles = ", ".join(f"{c.role} {c.replica} (pid {c.pid})" for c in view.components if c.pid) or "no role yet"
        typer.echo(f"this stops {found.name} ({view.state}): {roles}", err=True)
        confirm("stop it?")
    view = cancel_run(found, user=getpass.getuser())
    typer.echo(f"{found.name}: {view.state}")


def _follow_or_tell(run: RunDir, follow: bool) -> None:
    from rich.console import Console

    from hpcrl.runs.registry import reference

    if follow:
        raise typer.Exit(_follow(run, Console(stderr=True)))
    typer.echo(run.name)
    named = reference(run)
    for command in ("status", "logs", "cancel"):
        extra = {"status": " --watch", "logs": " -f", "cancel": ""}[command]
        typer.echo(f"  hpcrl {command} {named}{extra}", err=True)


def _follow(run: RunDir, console: Console) -> int:
    """Follow a run to its end and print the summary; returns the exit code."""
    from rich.console import Console as StandardOutput

    from hpcrl.errors import ExitCode, UsageError
    from hpcrl.runs.metrics import read_metrics
    from hpcrl.runs.record import RunRecord
    from hpcrl.runs.registry import reference
    from hpcrl.runs.run_progress import read_progress
    from hpcrl.runs.status import RunState
    from hpcrl.runs.views.follow import follow
    from hpcrl.runs.views.liveview import summary
    from hpcrl.runs.views.report import write_report
    from hpcrl.submit.submission import interrupt

    before = RunRecord.read(run).submissions[-1].after_attempt
    view = follow(run, console, on_interrupt=lambda count: interrupt(run, count), after_attempt=before)
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
    named = reference(run)
    typer.echo(f"  hpcrl why {named}\n  hpcrl resume {named}", err=True)
    if view.state is RunState.CANCELLED:
        return ExitCode.CANCELLED
    return view.cause.kind.exit_code if view.cause is not None else ExitCode.FAILED
